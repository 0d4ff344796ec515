"""How the state is stored: JSON arrays by msgspec, in closed trajectories, deltas and snapshots."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from clawstream.stream_jobs.assemble.state.annotations import CurrentReward, CurrentRewards
from clawstream.stream_jobs.assemble.state.steps import OpenStep, OpenSteps

T = TypeVar("T")
_ITEMS: dict[type, Any] = {OpenSteps: list[OpenStep], CurrentRewards: list[CurrentReward]}
"""Lists with lookup tables, and the plain lists as which they are stored."""

encode = msgspec.json.Encoder(order="deterministic").encode


def decoder(of: type[T]) -> msgspec.json.Decoder[T]:
    """Return a decoder of a stored type."""
    return msgspec.json.Decoder(of, dec_hook=_with_lookup_table)


def _with_lookup_table(kind: type, items: Any) -> Any:
    return kind(msgspec.convert(items, _ITEMS[kind]))

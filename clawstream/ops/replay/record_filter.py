"""Select recorded records, under another run id if asked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from clawstream.schemas.ids import parse_version
from clawstream.schemas.records import Assessment, Reward
from clawstream.schemas.settings.reward_models import SOURCES

REWARDER = "clawstream.reward"
"""Field `by` of the reward job's rewards."""


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records are copied.

    run: Of this run only; None: of all. as_run: Another run id for the copies. rewards,
    assessments: Whether those of the reward job are included. trajectory_keys: Of these
    trajectories only; None: of all.
    """

    run: str | None = None
    as_run: str | None = None
    rewards: bool = True
    assessments: bool = True
    trajectory_keys: frozenset[str] | None = None

    def apply(self, event: Any) -> Any | None:
        """Return the record of the copy, or None when the record is omitted."""
        if self.run is not None and event.run_id != self.run:
            return None
        if self.trajectory_keys is not None and event.trajectory_key not in self.trajectory_keys:
            return None
        if isinstance(event, Reward) and not self.rewards:
            if event.by == REWARDER and event.source in {"rule", "next_state", *SOURCES.values()}:
                return None
        elif isinstance(event, Assessment) and not self.assessments:
            return None
        return event if self.as_run is None else renamed(event, self.as_run)


def renamed(event: Any, run_id: str) -> Any:
    """Return a copy of a record under another run id; version ids of its run are renamed, too."""
    old = event.run_id
    changes: dict[str, Any] = {"run_id": run_id}
    for name in ("version_first", "version_last"):
        if (version := getattr(event, name, None)) is not None:
            changes[name] = _version(version, old, run_id)
    if spans := getattr(event, "versions", ()):
        changes["versions"] = tuple(
            dataclasses.replace(s, version=_version(s.version, old, run_id)) for s in spans
        )
    return dataclasses.replace(event, **changes)


def _version(version: str, old: str, new: str) -> str:
    parsed = parse_version(version)
    if parsed is None or parsed.run_id != old:
        return version
    return str(parsed._replace(run_id=new))

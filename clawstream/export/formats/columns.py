"""The Arrow columns of an export row, and their values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from clawstream.export.row import ExportRow
from clawstream.trainer.data.sequences import Tokens

Values = dict[str, Any]

_SPAN = pa.struct(
    [
        pa.field("version", pa.string(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
    ]
)
ORIGIN = (
    pa.field("run_id", pa.string()),
    pa.field("trajectory_id", pa.string()),
    pa.field("step_id", pa.string()),
    pa.field("group_id", pa.string()),
    pa.field("round", pa.int32()),
    pa.field("channel", pa.string()),
    pa.field("outcome", pa.string()),
    pa.field("model", pa.string()),
    pa.field("reward", pa.float64()),
    pa.field("group_reward_mean", pa.float64()),
    pa.field("group_reward_std", pa.float64()),
    pa.field("group_rewards", pa.int32()),
    pa.field("quality", pa.float64()),
    pa.field("tags", pa.list_(pa.string())),
    pa.field("step_tags", pa.list_(pa.string())),
    pa.field("metadata_json", pa.string()),
)
"""Columns of the trajectory."""
SEQUENCE = pa.schema(
    [
        *ORIGIN,
        pa.field("messages_json", pa.string()),
        pa.field("tools_json", pa.string()),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.bool_())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("temperatures", pa.list_(pa.float32())),
        pa.field("weight_versions", pa.list_(_SPAN)),
    ]
)
"""Columns of a training sequence. logprobs and temperatures are null where the mask is off."""


def origin_values(row: ExportRow) -> Values:
    """Return the values of ORIGIN."""
    origin = row.origin
    return {
        "run_id": origin.run_id,
        "trajectory_id": origin.trajectory_id,
        "step_id": row.step_id,
        "group_id": origin.group_id,
        "round": origin.round,
        "channel": origin.channel,
        "outcome": origin.outcome,
        "model": row.model,
        "reward": origin.reward,
        "group_reward_mean": origin.group_reward_mean,
        "group_reward_std": origin.group_reward_std,
        "group_rewards": origin.group_rewards,
        "quality": origin.quality,
        "tags": list(origin.tags),
        "step_tags": list(row.step_tags),
        "metadata_json": origin.metadata_json,
    }


def sequence_values(row: ExportRow) -> Values:
    """Return the values of SEQUENCE."""
    tokens = row.tokens
    assert tokens is not None, "a row of a token format has tokens"
    chat = row.chat
    unknown_temperature = ~tokens.mask | np.isnan(tokens.temperatures)
    return {
        **origin_values(row),
        "messages_json": None if chat is None else _dumped(chat.messages),
        "tools_json": None if chat is None or not chat.tools else _dumped(chat.tools),
        "token_ids": tokens.ids,
        "loss_mask": tokens.mask,
        "logprobs": pa.array(tokens.logprobs, mask=~tokens.mask),
        "temperatures": pa.array(tokens.temperatures, mask=unknown_temperature),
        "weight_versions": list(version_spans(tokens)),
    }


def version_spans(tokens: Tokens) -> Iterator[dict[str, Any]]:
    """Yield the runs [start, end) of trained tokens that one known weight version sampled."""
    versions = tokens.versions.copy()
    versions[~tokens.mask] = None
    starts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], len(versions)], strict=True):
        if versions[start] is not None:
            yield {"version": versions[start], "start": start, "end": end}


def _dumped(value: Any) -> str:
    return json.dumps(value)  # ASCII: a lone surrogate stays an escape

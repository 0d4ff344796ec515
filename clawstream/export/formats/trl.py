"""Parquet with the columns that TRL's trainers read.

- `input_ids` and `completion_mask`: the recorded tokens, and 1 for each sampled token. `SFTTrainer`
  does not tokenize again when a dataset has `input_ids`, so it trains the tokens of the policy.
- `prompt`, `completion`, `tools`: the request and reply of the sequence's last step as chat
  messages ("conversational" format); `tools` is JSON. For trainers that tokenize text themselves.
- `reward`, `advantage` (reward minus group mean) and `logprobs` (of the sampled tokens, null for
  others) for own losses and filters; TRL ignores them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clawstream.export.formats.columns import ORIGIN, origin_values
from clawstream.export.formats.parquet import FILE, ParquetFile
from clawstream.export.row import ExportRow
from clawstream.schemas.conversation import texts_of

_CALL = pa.struct(
    [
        pa.field("id", pa.string()),
        pa.field("type", pa.string()),
        pa.field(
            "function",
            pa.struct([pa.field("name", pa.string()), pa.field("arguments", pa.string())]),
        ),
    ]
)
_MESSAGES = pa.list_(
    pa.struct(
        [
            pa.field("role", pa.string()),
            pa.field("content", pa.string()),
            pa.field("tool_calls", pa.list_(_CALL)),
            pa.field("tool_call_id", pa.string()),
        ]
    )
)
COLUMNS = pa.schema(
    [
        pa.field("prompt", _MESSAGES),
        pa.field("completion", _MESSAGES),
        pa.field("tools", pa.string()),
        pa.field("input_ids", pa.list_(pa.int64())),
        pa.field("completion_mask", pa.list_(pa.int64())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("advantage", pa.float64()),
        *ORIGIN,
    ]
)


class TrlWriter:
    """Writes `data.parquet`."""

    def __init__(self, directory: Path) -> None:
        self._file = ParquetFile(directory / FILE, COLUMNS)

    def write(self, row: ExportRow) -> str | None:
        """Write one sequence."""
        tokens, chat = row.tokens, row.chat
        assert tokens is not None, "a row of a token format has tokens"
        messages = [] if chat is None else [_message(m) for m in chat.messages]
        self._file.add(
            {
                **origin_values(row),
                "prompt": messages[:-1] or None,
                "completion": messages[-1:] or None,
                "tools": json.dumps(chat.tools) if chat is not None and chat.tools else None,
                "input_ids": tokens.ids.astype(np.int64),
                "completion_mask": tokens.mask.astype(np.int64),
                "logprobs": pa.array(tokens.logprobs, mask=~tokens.mask),
                "advantage": row.origin.advantage,
            }
        )
        return None

    def close(self, provenance: str) -> None:
        """Complete the file."""
        self._file.close(provenance)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with text only: one Arrow type holds all messages."""
    calls = message.get("tool_calls")
    call_id = message.get("tool_call_id")
    return {
        "role": str(message.get("role")),
        "content": _words(message),
        "tool_calls": [_call(c) for c in calls if isinstance(c, dict)]
        if isinstance(calls, list) and calls
        else None,
        "tool_call_id": call_id if isinstance(call_id, str) else None,
    }


def _words(message: Mapping[str, Any]) -> str:
    """Return the text of a message; its text parts are joined without a separator.

    A lone surrogate, which JSON can have and UTF-8 can't, becomes a question mark.
    """
    return "".join(texts_of(message)).encode("utf-8", "replace").decode()


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    given = function.get("arguments")
    return {
        "id": _text(call.get("id")),
        "type": "function",
        "function": {
            "name": _text(function.get("name")),
            "arguments": given if isinstance(given, str) else json.dumps(given),
        },
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None

"""Chat messages as JSON lines: `{"messages": [...], "tools": [...], "reward": ..., ...}`.

The messages have the shape of Chat Completions, which most supervised fine-tuning tools read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

from clawstream.export.row import ExportRow

FILE = "data.jsonl"


class JsonlWriter:
    """Writes `data.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / FILE).open("wb")

    def write(self, row: ExportRow) -> str | None:
        """Write one line."""
        if row.chat is None:
            return "request or reply is no chat"
        origin = row.origin
        line = {
            "messages": row.chat.messages,
            **({"tools": row.chat.tools} if row.chat.tools else {}),
            "reward": origin.reward,
            "run_id": origin.run_id,
            "trajectory_id": origin.trajectory_id,
            "step_id": row.step_id,
            "group_id": origin.group_id,
            "round": origin.round,
            "channel": origin.channel,
            "outcome": origin.outcome,
            "quality": origin.quality,
            "tags": origin.tags,
            "step_tags": row.step_tags,
            "model": row.model,
            "metadata": _loaded(origin.metadata_json),
        }
        self._file.write(_dumped(line) + b"\n")
        return None

    def close(self, provenance: str) -> None:
        """Close the file. JSON lines have no metadata; `provenance.json` has it."""
        self._file.close()


def _dumped(line: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(line)
    except TypeError:  # a lone surrogate, which only the standard library writes as an escape
        return json.dumps(line).encode()


def _loaded(text: str | None) -> object:
    """Return the JSON value; text that is no JSON stays text."""
    try:
        return None if text is None else orjson.loads(text)
    except orjson.JSONDecodeError:
        return text

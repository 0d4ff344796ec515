"""The demo's rule reward: the score of the task, computed from the recorded trajectory alone."""

from __future__ import annotations

import json
from typing import Any

from clawstream.demo.task import key_of, score
from clawstream.schemas.records import Trajectory


def price_answer(trajectory: Trajectory) -> float:
    """Return 1.0 for the right sum, 0.1 for the right first lookup, else 0.0.

    Raises:
        KeyError, ValueError: the trajectory has no metadata of the task.
    """
    if trajectory.metadata_json is None:
        raise ValueError("the trajectory was opened without metadata")
    task = json.loads(trajectory.metadata_json)
    replies = [
        json.loads(step.response_json) for step in sorted(trajectory.steps, key=lambda s: s.index)
    ]
    first_key = _first_key(replies[0]) if replies else None
    answer = replies[-1].get("content") if replies and not replies[-1].get("tool_calls") else None
    return score(task["gold"], task["key"], answer, first_key)


def _first_key(message: dict[str, Any]) -> str | None:
    try:
        return key_of(message["tool_calls"][0]["function"]["arguments"])
    except (KeyError, TypeError, IndexError):
        return None

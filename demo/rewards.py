"""The demo's rule reward: the same scoring as the task, computed from the recorded trajectory
alone.
"""

from __future__ import annotations

import json

from demo.task import score
from schemas.records import Trajectory


def price_answer(trajectory: Trajectory) -> float:
    """1.0 for the right sum, 0.1 for the right first lookup.

    Raises KeyError or ValueError without the task's metadata.
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


def _first_key(message: dict[str, object]) -> str | None:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return None
    try:
        key = json.loads(calls[0]["function"]["arguments"])["key"]
    except (ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) else None

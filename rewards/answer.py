"""What rule rewards compare: the expected answer and the one that was given."""

from __future__ import annotations

from typing import Any

import orjson

from schemas.events import Trajectory


def metadata(trajectory: Trajectory) -> dict[str, Any]:
    """The metadata said at opening. Raises ValueError when there is none or it is no JSON object."""
    if trajectory.metadata_json is None:
        raise ValueError("no metadata")
    found = orjson.loads(trajectory.metadata_json)
    if not isinstance(found, dict):
        raise ValueError("metadata is no JSON object")
    return found


def gold(trajectory: Trajectory) -> str:
    """The expected answer: `gold` of the metadata, else `reward_model.ground_truth`, as verl's datasets have it. Raises ValueError."""
    said = metadata(trajectory)
    found = said.get("gold")
    if found is None and isinstance(model := said.get("reward_model"), dict):
        found = model.get("ground_truth")
    if found is None:
        raise ValueError("metadata has no gold")
    return str(found)


def last_answer(trajectory: Trajectory) -> str:
    """Text of the last step's reply. Raises ValueError when there is no step, or its reply has no text."""
    if not trajectory.steps:
        raise ValueError("no steps")
    reply = orjson.loads(trajectory.steps[-1].response_json)
    text = reply.get("content") if isinstance(reply, dict) else None
    if not isinstance(text, str):
        raise ValueError("the last reply has no text")
    return text

"""Extract the expected and the given answer of a trajectory, for rule rewards."""

from __future__ import annotations

from typing import Any

import orjson

from schemas.records import Trajectory, TrajectoryStep
from schemas.replies import AUXILIARY_TAGS, answer_in, loaded


def metadata(trajectory: Trajectory) -> dict[str, Any]:
    """Return the metadata set at opening.

    Raises:
        ValueError: It is absent or no JSON object.
    """
    if trajectory.metadata_json is None:
        raise ValueError("no metadata")
    found = orjson.loads(trajectory.metadata_json)
    if not isinstance(found, dict):
        raise ValueError("metadata is no JSON object")
    return found


def gold(trajectory: Trajectory) -> str:
    """Return the expected answer: metadata `gold`, else verl's `reward_model.ground_truth`.

    Raises:
        ValueError: The metadata has neither.
    """
    fields = metadata(trajectory)
    found = fields.get("gold")
    if found is None and isinstance(model := fields.get("reward_model"), dict):
        found = model.get("ground_truth")
    if found is None:
        raise ValueError("metadata has no gold")
    return str(found)


def last_answer(trajectory: Trajectory) -> str:
    """Return the text of the agent's last reply.

    Ignores auxiliary calls (of a sub-agent, for a title, a summary or a compaction) and calls that
    a retry replaced.

    Raises:
        ValueError: there is no such step, or its reply has no text.
    """
    if not trajectory.steps:
        raise ValueError("no steps")
    text = answer_in(loaded(own_steps(trajectory)[-1].response_json))
    if text is None:
        raise ValueError("the last reply has no text")
    return text


def own_steps(trajectory: Trajectory) -> list[TrajectoryStep]:
    """Return the steps of the agent's main conversation.

    Raises:
        ValueError: There are none.
    """
    steps = [step for step in trajectory.steps if is_own_step(step)]
    if not steps:
        raise ValueError("no step but auxiliary and retried calls")
    return steps


def is_own_step(step: TrajectoryStep) -> bool:
    """Return whether a step belongs to the agent's main conversation."""
    return not step.marks and not any(tag.name in AUXILIARY_TAGS for tag in step.tags)

"""Extract the expected and the given answer of a trajectory, for rule rewards."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import orjson

from clawstream.schemas.conversation import AUXILIARY_TAGS, answer_in, loaded, without_thoughts
from clawstream.schemas.records import Trajectory, TrajectoryStep

Gold = str | int | float | Decimal | bool


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


def golds(trajectory: Trajectory) -> list[Gold]:
    """Return the accepted answers: metadata `gold`, else verl's `reward_model.ground_truth`.

    A list, and verl's `{"target": ...}`, are several of them. Numbers have the digits of the
    metadata: a `float` could not hold them.

    Raises:
        ValueError: The metadata has none, or something else.
    """
    metadata(trajectory)
    assert trajectory.metadata_json is not None
    fields = json.loads(trajectory.metadata_json, parse_float=Decimal)
    found = fields.get("gold")
    if found is None and isinstance(model := fields.get("reward_model"), dict):
        found = model.get("ground_truth")
    if isinstance(found, dict) and found.keys() == {"target"}:
        found = found["target"]
    accepted = found if isinstance(found, list) else [found]
    if not accepted or found is None:
        raise ValueError("metadata has no gold")
    for one in accepted:
        if not isinstance(one, Gold):
            raise ValueError(f"gold is no text or number: {json.dumps(one, default=str):.80}")
    return accepted


def last_answer(trajectory: Trajectory) -> str:
    """Return the text of the agent's last reply, without thoughts in tags such as <think>.

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
    return without_thoughts(text)


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

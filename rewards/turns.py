"""The turns of a trajectory: what each step got, and what came next. Pure."""

from __future__ import annotations

from typing import Any

from clawstream.rewards.answer import is_own_step
from clawstream.schemas.conversation import loaded
from clawstream.schemas.records import Trajectory, TrajectoryStep


def new_messages(step: TrajectoryStep) -> list[Any]:
    """Return the messages that the step's request added, in the shape of its protocol.

    They follow the last reply in the request; a first request added all of its messages.

    Raises:
        ValueError: They are not recorded.
    """
    if step.new_messages_json is None:
        raise ValueError(f"step {step.step_id}: no messages; see jobs.new_messages_bytes")
    found: list[Any] = loaded(step.new_messages_json)
    return found


def next_messages(trajectory: Trajectory, step: TrajectoryStep) -> list[Any] | None:
    """Return what the agent got after a step: a user's message, or results of tools.

    Auxiliary and retried calls are no next turn, nor is a step whose history diverges from what was
    sampled.

    Returns:
        The new messages of the first step that continues this one; None if none does.

    Raises:
        ValueError: The messages of the next turn are not recorded.
    """
    for other in trajectory.steps:
        if other.parent == step.index and other.drift != "forked" and is_own_step(other):
            return new_messages(other)
    return None


def turns_until(trajectory: Trajectory, step: TrajectoryStep) -> list[TrajectoryStep]:
    """Return the steps that the step continues, oldest first, and the step."""
    turns = [step]
    while (parent := turns[-1].parent) is not None:
        turns.append(trajectory.steps[parent])
    return turns[::-1]

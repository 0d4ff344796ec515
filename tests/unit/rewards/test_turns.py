"""What came after a step: the next turn of the same conversation, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.assemble import LIMITS, InMemoryPartition, chat_step, session

from clawstream.rewards.turns import next_messages, turns_until
from clawstream.schemas.records import Step, Tag, Trajectory
from clawstream.schemas.tokens import pack_ids
from clawstream.stream_jobs.assemble.state.trajectories import STEPS

Message = dict[str, Any]
ASK: Message = {"role": "user", "content": "Is it open?"}
YES: Message = {"role": "assistant", "content": "Yes."}
NO: Message = {"role": "assistant", "content": "No."}


def user(said: str) -> Message:
    return {"role": "user", "content": said}


def chat(n: int, *messages: Message, reply: str = "Done.", **more: Any) -> Step:
    return chat_step(n, messages, {"content": reply}, key="k", **more)


def closed(*steps: Step, limit: int = 1000) -> Trajectory:
    worker = InMemoryPartition(replace(LIMITS, new_messages_bytes=limit))
    worker.feed(*((STEPS, i, one) for i, one in enumerate(steps)))
    return worker.feed((STEPS, 99, session("k", "completed"))).trajectories["k"]


def next_turns(*steps: Step) -> list[list[Any] | None]:
    """Return what came after each step, in the order of their ids."""
    trajectory = closed(*steps)
    ordered = sorted(trajectory.steps, key=lambda step: step.step_id)
    return [next_messages(trajectory, step) for step in ordered]


FIRST = chat(0, ASK, reply="Yes.")


def test_the_next_message_of_the_user_follows_a_reply() -> None:
    thanks = chat(1, ASK, YES, user("Thanks!"))
    assert next_turns(FIRST, thanks) == [[user("Thanks!")], None]


def test_a_reply_that_returns_in_other_tokens_is_continued() -> None:
    thanks = chat(1, ASK, YES, user("Thanks!"))
    sampled = replace(FIRST, response_token_ids=pack_ids([7, 8]), response_logprobs=None)
    assert next_turns(sampled, thanks) == [[user("Thanks!")], None]


@pytest.mark.parametrize(
    "other",
    [
        chat(1, ASK, NO, user("A pity.")),  # an edited reply
        chat(1, user("A summary: it is open."), user("Thanks!")),
        chat(1, ASK, YES, user("Sum up."), tags=(Tag(name="summary", evidence="e"),)),
    ],
)
def test_other_calls_are_no_next_turn(other: Step) -> None:
    assert next_turns(FIRST, other) == [None, None]


def test_of_two_branches_the_first_counts() -> None:
    branches = [chat(n, ASK, YES, user(said)) for n, said in ((1, "Thanks!"), (2, "Sure?"))]
    assert next_turns(FIRST, *branches) == [[user("Thanks!")], None, None]


def test_messages_that_are_not_recorded_are_an_error() -> None:
    trajectory = closed(FIRST, chat(1, ASK, YES, user("Thanks!")), limit=0)
    with pytest.raises(ValueError, match=r"no messages; see jobs\.new_messages_bytes"):
        next_messages(trajectory, trajectory.steps[0])


def test_the_turns_until_a_step_are_its_branch() -> None:
    trajectory = closed(FIRST, chat(1, ASK, YES, user("Thanks!")), chat(2, ASK, YES, user("Sure?")))
    last = trajectory.steps[-1]
    assert turns_until(trajectory, last) == [trajectory.steps[0], last]

"""Prompt drift: a prompt repeats a reply in its sampled tokens, in other tokens, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest
from support.assemble import InMemoryPartition, chat_step, session

from clawstream.schemas.records import Step
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.stream_jobs.assemble.payload.segment_tree import prompt_of
from clawstream.stream_jobs.assemble.state.trajectories import STEPS

TASK = [{"role": "user", "content": "2+2?"}]
SAMPLED: Mapping[str, Any] = {
    "response_token_ids": pack_ids([9, 8, 2000]),
    "response_logprobs": pack_logprobs([-0.5] * 3),
}
"""Sampled tokens that differ from the tokens of the same reply in a later prompt."""


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(arguments: str, text: str | None = None) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return said(text or "", tool_calls=[{"id": "call_1", "type": "function", "function": function}])


def drifted(
    reply: Mapping[str, Any], comes_back: Mapping[str, Any], **more: Any
) -> list[tuple[str, int | None]]:
    w = InMemoryPartition().feed(
        (STEPS, 0, chat_step(0, TASK, reply, key="k", **SAMPLED)),
        (STEPS, 1, chat_step(1, [*TASK, comes_back, user("sure?")], said("yes"), key="k", **more)),
        (
            STEPS,
            2,
            chat_step(
                2,
                [*TASK, comes_back, user("sure?"), said("yes"), user("really?")],
                said("yes"),
                key="k",
            ),
        ),
    )
    w.feed((STEPS, 3, session("k", "completed")))
    return [(s.drift, s.parent) for s in w.trajectories["k"].steps]


@pytest.mark.parametrize(
    ("reply", "comes_back"),
    [
        (said("4"), said("4")),
        (said("4"), said(" 4\n")),
        (said("4", reasoning_content="two and two"), said("4")),
        (call('{"a": 2, "b": 2}'), call('{"b":2,"a":2}')),
        (call("{}", "I add"), call("{}", "I add")),
    ],
)
def test_the_same_reply_in_other_tokens_is_realigned(
    reply: Mapping[str, Any], comes_back: Mapping[str, Any]
) -> None:
    assert drifted(reply, comes_back) == [("root", None), ("realigned", 0), ("clean", 1)]


@pytest.mark.parametrize(
    ("reply", "comes_back", "more"),
    [
        (said("4"), said("5"), {}),
        (call('{"a": 2}'), call('{"a": 3}'), {}),
        (call("{}", "I add"), call("{}"), {}),
        (said("4"), said("4"), {"request_json": b'{"prompt":"2+2? 4 sure?"}'}),
        (said("4"), said("4"), {"request_json": b"no JSON"}),
    ],
)
def test_another_reply_or_a_request_that_does_not_show_it_is_a_fork(
    reply: Mapping[str, Any], comes_back: Mapping[str, Any], more: Mapping[str, Any]
) -> None:
    assert drifted(reply, comes_back, **more) == [("root", None), ("forked", None), ("clean", 1)]


def test_what_was_sampled_stays_as_it_was_sampled() -> None:
    w = InMemoryPartition().feed((STEPS, 0, chat_step(0, TASK, said("4"), key="k", **SAMPLED)))
    again = chat_step(1, [*TASK, said("4"), user("sure?")], said("yes"), key="k")
    w.feed((STEPS, 1, again), (STEPS, 2, session("k", "completed")))
    t = w.trajectories["k"]
    assert [s.trainable for s in t.steps] == [True, True]
    first, second = (s.segment for s in t.steps)
    assert first is not None and second is not None
    assert t.segments[first].token_ids == SAMPLED["response_token_ids"]
    assert prompt_of(t.segments, second) == again.prompt_token_ids


def conversation(turns: int) -> Sequence[Step]:
    """Return a conversation whose prompts repeat each reply in other than its sampled tokens.

    Each turn is asked twice, for two choices.
    """
    history, steps = list(TASK), []
    for n in range(turns):
        steps += [
            chat_step(2 * n + i, history, said(f"answer {n}"), key="k", **SAMPLED) for i in (0, 1)
        ]
        history += [said(f"answer {n}"), user(f"question {n}")]
    return steps


def test_a_long_conversation_that_always_drifts_is_a_chain_whatever_batches_and_crashes_there_were(
) -> None:  # fmt: skip
    steps = conversation(6)
    whole = InMemoryPartition().feed(
        *[(STEPS, i, s) for i, s in enumerate(steps)], (STEPS, 99, session("k", "completed"))
    )
    drifts = [(s.drift, s.parent) for s in whole.trajectories["k"].steps]
    assert drifts[:2] == [("root", None)] * 2
    assert drifts[2:] == [("realigned", i - 1 - i % 2) for i in range(2, 12)], (
        "from the latest of equal answers"
    )
    crashing = InMemoryPartition()
    for i, s in enumerate(steps):
        crashing.feed((STEPS, i, s))
        crashing.snapshot() if i % 5 == 4 else crashing.crash()
    crashing.feed((STEPS, 99, session("k", "completed")))
    assert crashing.trajectories == whole.trajectories


def test_the_request_is_read_only_where_a_prompt_has_drifted() -> None:
    w = InMemoryPartition()
    straight = chat_step(0, TASK, said("4"), key="k")
    for n, s in enumerate(
        [straight, chat_step(1, [*TASK, said("4"), user("sure?")], said("yes"), key="k")]
    ):
        w.feed((STEPS, n, s))
    w.feed((STEPS, 2, chat_step(2, [*TASK, said("5"), user("sure?")], said("no"), key="k")))
    assert [s.last_turn_hash is not None for s in w.state.opened["r", "k"].steps] == [
        False,
        False,
        True,
    ]
    assert orjson.loads(straight.request_json) == {"messages": TASK}

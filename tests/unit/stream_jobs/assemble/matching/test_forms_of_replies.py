"""Rollouts of one prompt whose agents repeat a reply in another form: each stays one trajectory."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.assemble import LIMITS, InMemoryPartition, chat_step
from support.examples import examples

from clawstream.schemas.records import Step, Tick
from clawstream.stream_jobs.assemble.matching.conversation import WORDS, likeness, words_of
from clawstream.stream_jobs.assemble.state.trajectories import STEPS

Message = Mapping[str, Any]
QUIET = replace(LIMITS, anonymous_inactivity=1_000_000)
TASK: list[Message] = [{"role": "user", "content": "Solve the task."}]


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def called(*calls: tuple[str, str, Any], text: str | None = None) -> Message:
    """calls: id, name and arguments of each."""
    made = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": orjson.dumps(given).decode()},
        }
        for call_id, name, given in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "any", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def split(steps: Sequence[Step]) -> list[list[str]]:
    """Return the numbers of the steps of each trajectory."""
    w = InMemoryPartition(QUIET).feed(*[(STEPS, i, s) for i, s in enumerate(steps)])
    w.feed((STEPS, 10_000_000, Tick(partition=0)))
    return sorted(
        sorted(s.step_id.rpartition("~")[2].partition(".")[0] for s in t.steps)
        for t in w.trajectories.values()
    )


def test_equal_calls_with_ids_that_are_counted_are_told_apart_by_what_came_before() -> None:
    """B ends first: its request has A's last call, too, but not A's result."""
    ask = {run: called(("functions.search:0", "search", {"q": run})) for run in "ab"}
    opens = called(("functions.open:1", "open", {"n": 1}))
    history = {run: [*TASK, ask[run], result(f"result {run}")] for run in "ab"}
    first = [chat_step(10 * i, TASK, ask[run], tokens=False) for i, run in enumerate("ab")]
    second = [
        chat_step(10 * i + 1, history[run], opens, tokens=False) for i, run in enumerate("ab")
    ]
    third = [
        chat_step(
            10 * i + 2, [*history[run], opens, result(f"page {run}")], said("x"), tokens=False
        )
        for i, run in [(1, "b"), (0, "a")]
    ]
    assert split([*first, *second, *third]) == [["C0", "C1", "C2"], ["C10", "C11", "C12"]]


def test_thoughts_that_the_history_drops() -> None:
    first = [
        chat_step(10 * i, TASK, said(f"<think>long {run}</think>\n\nStep one {run}"), tokens=False)
        for i, run in enumerate("AB")
    ]
    second = [
        chat_step(
            10 * i + 1, [*TASK, said(f"Step one {run}"), user("go on")], said("x"), tokens=False
        )
        for i, run in reversed([*enumerate("AB")])
    ]
    assert split([*first, *second]) == [["C0", "C1"], ["C10", "C11"]]


@pytest.mark.parametrize("added", ["\nCalling tools:\n[{'id': 'call_1'}]", "!", " and so on"])
def test_words_that_the_history_adds(added: str) -> None:
    replies = [f"FAKE-FINAL: all done. end-R{1350 + i}" for i in range(2)]
    first = [chat_step(10 * i, TASK, said(r), tokens=False) for i, r in enumerate(replies)]
    second = [
        chat_step(
            10 * i + 1, [*TASK, said(r + added), user("Observation")], said("x"), tokens=False
        )
        for i, r in reversed([*enumerate(replies)])
    ]
    assert split([*first, *second]) == [["C0", "C1"], ["C10", "C11"]]


def test_the_first_of_several_calls_and_other_ids() -> None:
    replies = [
        called(
            (f"call_{i}x", "search", {"q": f"part {i}"}), (f"call_{i}y", "open", {"n": i}), text="?"
        )
        for i in range(3)
    ]
    kept = [called((f"id-{9 - i}", "search", {"q": f"part {i}"})) for i in range(3)]
    first = [chat_step(10 * i, TASK, r, tokens=False) for i, r in enumerate(replies)]
    second = [
        chat_step(10 * i + 1, [*TASK, kept[i], result("r")], said("x"), tokens=False)
        for i in (2, 0, 1)
    ]
    assert split([*first, *second]) == [[f"C{10 * i}", f"C{10 * i + 1}"] for i in range(3)]


def test_reasoning_items_of_responses_belong_to_the_reply() -> None:
    """The request of a step is the items before its reasoning item."""

    def items(n: int, *more: Message) -> Step:
        reply = {
            "output": [
                {"type": "reasoning", "summary": []},
                {
                    "type": "function_call",
                    "call_id": "fc_1",
                    "name": "ls",
                    "arguments": f'{{"n":{n}}}',
                },
            ]
        }
        return chat_step(
            n, [], {}, tokens=False,
            request_json=orjson.dumps({"input": [*TASK, *more]}),
            response_json=orjson.dumps(reply),
        )  # fmt: skip

    back = [
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "other", "name": "ls", "arguments": '{"n": 10}'},
        {"type": "function_call_output", "call_id": "other", "output": "x"},
    ]
    assert split([items(0), items(10), items(11, *back)]) == [["C0"], ["C10", "C11"]]


def test_samples_of_long_turns_are_compared_where_both_have_one() -> None:
    words = [f"w{i}" for i in range(200)]
    whole, cut = (words_of([said(" ".join(some))]) for some in (words, words[:60]))
    other = words_of([said(" ".join(f"v{i}" for i in range(200)))])
    assert len(whole) == len(cut) == 2 * WORDS
    assert likeness(whole, cut)[0] > 0.9 and likeness(whole, other)[0] < 0.2
    assert likeness(whole, whole) == (1.0, 1.0) and likeness(b"", whole) == (0.0, 0.0)


def test_a_short_reply_with_words_of_another_one_is_not_taken_for_it() -> None:
    """The reply of C10 has no word that the turn lacks; that of C0 has one, its id."""
    replies = [called(("call_0x", "search", {"q": "first part of it"})), said("first part")]
    kept = called(("id-9", "search", {"q": "first part of it"}))
    first = [chat_step(10 * i, TASK, r, tokens=False) for i, r in enumerate(replies)]
    second = chat_step(1, [*TASK, kept, result("r")], said("x"), tokens=False)
    assert split([*first, second]) == [["C0", "C1"], ["C10"]]


# -- any rollouts in any forms


def _thoughts_dropped(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


TEXT_FORMS: Sequence[Callable[[str], Message]] = (
    said,
    lambda text: said(_thoughts_dropped(text)),
    lambda text: {"role": "assistant", "content": [{"type": "text", "text": text}]},
    lambda text: said(_thoughts_dropped(text) + "\nCalling tools:\n[{'id': 'call_1'}]"),
    lambda text: said("Answer so far: " + _thoughts_dropped(text)),
    lambda text: said(_thoughts_dropped(text).partition(".")[0]),
)
Calls = Sequence[tuple[str, str, Any]]
CALL_FORMS: Sequence[Callable[[Calls], Message]] = (
    lambda calls: called(*calls),
    lambda calls: called(*[(c[0].replace("_", ""), *c[1:]) for c in calls]),
    lambda calls: called(*[(f"chatcmpl-tool-{i}", *c[1:]) for i, c in enumerate(calls)]),
    lambda calls: called(calls[0]),
    lambda calls: called(*calls, text="I call a tool."),
    lambda calls: said(f"Calling tools:\n{[{'id': i, 'name': n, 'args': a} for i, n, a in calls]}"),
)


def rollout(number: int, turns: int, rng: random.Random) -> list[Step]:
    """Return the calls of one rollout. Only its first reply names it: later ones may be equal."""
    history, steps = list(TASK), list[Step]()
    counted = rng.random() < 0.5
    form, tokens = rng.randrange(6), rng.random() < 0.5
    for turn in range(turns):
        name = f"file{number}" if turn == 0 or rng.random() < 0.5 else "the rest"
        if rng.random() < 0.5:
            thought = rng.choice(["", f"<think>maybe file{rng.randrange(8)}, or not.</think>\n\n"])
            text = f"{thought}I read {name} now. Then I go on."
            reply, back = said(text), TEXT_FORMS[form](text)
        else:
            ids = [f"call_{i}" if counted else f"call_{number}{turn}{i}k" for i in range(2)]
            calls = [(ids[0], "read", {"path": name}), (ids[1], "list", {"depth": turn})]
            calls = calls[: rng.randint(1, 2)]
            reply, back = called(*calls), CALL_FORMS[form](calls)
        steps.append(chat_step(100 * number + turn, history, reply, tokens=tokens))
        history = [*history, back, result(f"contents {rng.choice([number, 'equal'])}")]
    return steps


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.integers(2, 8), st.randoms(use_true_random=False))
def test_interleaved_rollouts_that_repeat_replies_in_any_form(
    count: int, rng: random.Random
) -> None:
    rows = [rollout(i + 1, rng.randint(1, 4), rng) for i in range(count)]
    expected = sorted([s.call_id.rpartition("~")[2] for s in row] for row in rows)
    left, log = [list(row) for row in rows], list[Step]()
    while left := [row for row in left if row]:
        log.append(rng.choice(left).pop(0))
    assert split(log) == expected

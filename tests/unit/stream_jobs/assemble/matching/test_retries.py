"""Client retries: the step that counts, and calls that are not retries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.assemble import (
    ANONYMOUS_KEY,
    LIMITS,
    InMemoryPartition,
    chat_step,
    content,
    session,
    step,
)
from support.examples import examples

from clawstream.schemas.records import Step, Tick
from clawstream.schemas.tokens import pack_ids
from clawstream.stream_jobs.assemble.state.trajectories import STEPS

TASK = [{"role": "user", "content": "Fix the bug."}]


def closed(*steps: Step) -> InMemoryPartition:
    key = steps[0].trajectory_key
    ends = session(key, "completed", step_id=steps[0].step_id if key == ANONYMOUS_KEY else None)
    return InMemoryPartition().feed(
        *[(STEPS, i, s) for i, s in enumerate(steps)], (STEPS, 100, ends)
    )


def marked(w: InMemoryPartition) -> dict[str, str]:
    """Map the call number of each marked step of the only trajectory to its evidence."""
    (t,) = w.trajectories.values()
    c = w.last(t.trajectory_id)
    assert [s.trainable for s in c.steps] == [s.trainable for s in t.steps]
    assert all((s.segment is None, s.trainable) == (True, False) for s in t.steps if s.marks)
    assert all(s.marks in ((), ("retried",)) for s in t.steps)
    return {s.step_id.rpartition("~")[2]: str(s.untrainable_reason) for s in t.steps if s.marks}


def test_the_same_idempotency_key_is_the_same_call() -> None:
    w = closed(
        step("k", 0, [1], [2], idempotency_key="i"),
        step("k", 1, [1], [3], idempotency_key="i"),
        step("k", 2, [1, 3, 4], [5]),
    )
    assert marked(w) == {"C0.0": "retried as C1.0: same idempotency key"}
    t = w.trajectories["k"]
    assert [(s.step_id[-4:], s.index, s.parent, s.drift) for s in t.steps] == [
        ("C0.0", 0, None, "root"), ("C1.0", 1, None, "root"), ("C2.0", 2, 1, "clean"),
    ]  # fmt: skip
    # There is no branch for the reply that the client never received.
    assert [s.step_index for s in t.segments] == [
        None,
        1,
        None,
        2,
    ]
    assert w.last("k").trainable_tokens == 2


def test_equal_prompts_alone_are_rollouts() -> None:
    assert (
        marked(closed(step("k", 0, [1], [2]), step("k", 1, [1], [3]), step("k", 2, [1], [2]))) == {}
    )


@pytest.mark.parametrize("status", ["aborted", "error"])
def test_an_aborted_step_is_retried_by_the_identical_prompt(status: Any) -> None:
    w = closed(
        step("k", 0, [1, 2], [9], status=status), step("k", 1, [1], [3]), step("k", 2, [1, 2], [4])
    )
    assert marked(w) == {"C0.0": f"retried as C2.0: {status}, then asked again"}


def test_one_retry_for_one_aborted_step() -> None:
    w = closed(
        step("k", 0, [1], [9], status="aborted"), step("k", 1, [1], [3]), step("k", 2, [1], [4])
    )
    assert marked(w).keys() == {"C0.0"}
    w = closed(
        step("k", 0, [1], [9], status="aborted"),
        step("k", 1, [1], [8], status="aborted"),
        step("k", 2, [1], [4]),
    )
    assert marked(w).keys() == {"C0.0", "C1.0"}


def test_before_the_engine_had_answered_the_request_itself_is_compared() -> None:
    blind = {
        "prompt_token_ids": None,
        "response_token_ids": None,
        "response_logprobs": None,
        "status": "aborted",
    }
    more = {"request_json": b'{"messages":[1]}'}
    w = closed(
        step("k", 0, **blind, **more),
        step("k", 1, [1], [2], request_json=b"{}"),
        step("k", 2, [1], [2], **more),
    )
    assert marked(w).keys() == {"C0.0"}


ASKED = {"model": "m", "messages": TASK, "stream": True, "max_tokens": 9, "metadata": {"try": 1}}


@pytest.mark.parametrize(
    ("again", "is_retry"),
    [
        (ASKED, True),
        (dict(reversed(ASKED.items())), True),
        (ASKED | {"stream": False, "max_tokens": 8}, True),
        (ASKED | {"client_metadata": {"b": "2", "a": "1"}, "metadata": {"try": 2}}, True),
        (ASKED | {"stream_options": {"include_usage": True}, "user": "u"}, True),
        (ASKED | {"messages": [{"content": "Fix the bug.", "role": "user"}]}, True),
        (ASKED | {"messages": [{"content": "Fix a bug.", "role": "user"}]}, False),
        (ASKED | {"tools": [{"name": "ls"}]}, False),
        (ASKED | {"system": "Be brief."}, False),
    ],
)
@pytest.mark.parametrize("key", ["k", ANONYMOUS_KEY])
def test_a_cut_call_is_retried_by_an_equal_prompt_in_other_bytes(
    key: str, again: dict[str, Any], is_retry: bool
) -> None:
    """Codex orders the keys of its metadata anew, Claude Code streams no more."""
    cut = chat_step(
        0, TASK, {"content": "Fix"}, key, False, status="error", request_json=orjson.dumps(ASKED)
    )
    repeat = chat_step(1, TASK, {"content": "Done"}, key, False, request_json=orjson.dumps(again))
    if key == ANONYMOUS_KEY and not is_retry:
        w = InMemoryPartition().feed((STEPS, 0, cut), (STEPS, 1, repeat))
        assert len(w.state.opened) == 2
        return
    found = marked(closed(cut, repeat))
    assert found == ({"C0.0": "retried as C1.0: error, then asked again"} if is_retry else {})


@pytest.mark.parametrize("request_json", [b"{", b"[1]", b'{"prompt_embeds": "x"}'])
def test_a_request_without_a_prompt_is_compared_whole(request_json: bytes) -> None:
    cut, same = (
        chat_step(i, TASK, {"content": "x"}, "k", False, request_json=request_json) for i in (0, 1)
    )
    cut = replace(cut, status="error")
    other = replace(same, request_json=request_json + b" ")
    assert list(marked(closed(cut, same))) == ["C0.0"] and not marked(closed(cut, other))


def test_what_came_late_to_the_log_but_ended_badly_gives_way() -> None:
    w = closed(
        step("k", 0, [1], [2], idempotency_key="i"),
        step("k", 1, [1], [3], idempotency_key="i", status="aborted"),
    )
    assert marked(w) == {"C1.0": "retried as C0.0: same idempotency key"}


def test_what_the_client_went_on_from_counts() -> None:
    early = [
        step("k", 0, [1], [2], idempotency_key="i"),
        step("k", 1, [1], [3], idempotency_key="i"),
    ]
    assert marked(closed(*early, step("k", 2, [1, 2, 4], [5]))).keys() == {"C1.0"}
    assert marked(closed(early[0], step("k", 2, [1, 2, 4], [5]), early[1])).keys() == {"C1.0"}
    assert marked(
        closed(*early, step("k", 2, [1, 3, 4], [5]), step("k", 3, [1, 2, 4], [5]))
    ).keys() == {"C0.0"}


def test_an_idempotency_key_used_for_every_call_marks_nothing() -> None:
    w = closed(*[step("k", i, [1] * (i + 1), [2], idempotency_key="i") for i in range(3)])
    assert marked(w) == {}


def test_a_count_of_retries_tells_only_with_the_identical_prompt() -> None:
    first = step("k", 0, [1], [2])
    assert marked(closed(first, step("k", 1, [1], [3], retry_count=1))) == {
        "C0.0": "retried as C1.0: the client said that it tried again"
    }
    assert marked(closed(first, step("k", 1, [4], [3], retry_count=1))) == {}
    assert marked(closed(first, step("k", 1, [1], [3], retry_count=0))) == {}
    assert (
        marked(closed(first, step("k", 2, [1, 2, 3], [3]), step("k", 1, [1], [3], retry_count=1)))
        == {}
    )


def test_choices_are_retried_one_by_one_and_never_by_each_other() -> None:
    def choice(n: int, i: int, **more: Any) -> Step:
        return step(
            "k", n, [1], [n, i], step_id=f"k~C{n}.{i}", choice_index=i, idempotency_key="i", **more
        )

    w = closed(choice(0, 0), choice(0, 1), choice(1, 0), choice(1, 1))
    assert marked(w) == {
        "C0.0": "retried as C1.0: same idempotency key",
        "C0.1": "retried as C1.1: same idempotency key",
    }


def test_a_retried_first_call_begins_no_trajectory_of_its_anonymous_session() -> None:
    a, b = {"content": "a"}, {"content": "b"}
    w = closed(chat_step(0, TASK, a, status="aborted"), chat_step(1, TASK, b))
    assert marked(w) == {"C0.0": "retried as C1.0: aborted, then asked again"}
    w = closed(
        chat_step(0, TASK, a, idempotency_key="i"), chat_step(1, TASK, a, idempotency_key="i")
    )
    assert marked(w) == {"C0.0": "retried as C1.0: same idempotency key"}
    w = closed(chat_step(0, TASK, a, status="aborted", tokens=False), chat_step(1, TASK, b))
    assert marked(w).keys() == {"C0.0"}
    w = closed(
        chat_step(0, TASK, a, idempotency_key="i"),
        chat_step(1, [*TASK, *TASK], b, idempotency_key="i"),
    )
    assert len(w.trajectories) == 1 and marked(w) == {}
    # The second call may equally well be the first call of another rollout.
    w = closed(chat_step(0, TASK, a), chat_step(1, TASK, b, retry_count=1))
    assert len(w.trajectories) == 1 and marked(w) == {}


def test_payload_is_put_together_over_a_retried_step() -> None:
    """The cache stores only the part of a prompt that its base step lacks.

    The base may or may not be a branch of the segment tree.
    """
    w = closed(
        step("k", 0, [1], [2], idempotency_key="i"),
        step("k", 1, [1], [3], idempotency_key="i"),
        step("k", 2, [1, 3, 4], [5], idempotency_key="j"),
        step("k", 3, [1, 3, 4], [6], idempotency_key="j"),
        step("k", 4, [1, 3, 4, 5, 7], [8], idempotency_key="l"),
        step("k", 5, [1, 3, 4, 6, 7], [9], idempotency_key="m"),
        step("k", 6, [1, 3, 4, 6, 7], [9], idempotency_key="m"),
    )
    assert marked(w).keys() == {"C0.0", "C3.0", "C5.0"}
    assert [s.token_ids for s in w.trajectories["k"].segments if s.step_index is None][
        -1
    ] == pack_ids([6, 7])


@settings(max_examples=examples(60))
@given(st.data())
def test_duplicates_and_crashes_mark_the_same(data: st.DataObject) -> None:
    log = [
        step(
            "k", i, [1] * data.draw(st.integers(1, 3)), [data.draw(st.integers(1, 3))],
            status=data.draw(st.sampled_from(["ok", "ok", "aborted"])),
            idempotency_key=data.draw(st.sampled_from([None, "i", "j"])),
            retry_count=data.draw(st.sampled_from([None, 1])),
        )
        for i in range(data.draw(st.integers(1, 7)))
    ]  # fmt: skip
    plain, w = closed(*log), InMemoryPartition(replace(LIMITS))
    again = list(log)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(again) - 1))
        again.insert(data.draw(st.integers(at + 1, len(again))), again[at])
    for at, event in enumerate(again):
        w.decide([(STEPS, at, at, event)])
        if data.draw(st.booleans()):
            w.crash()
        w.emit()
    w.batch(
        [
            (STEPS, len(again), 100, session("k", "completed")),
            (STEPS, len(again) + 1, 101, Tick(partition=0)),
        ]
    )
    ours, theirs = content(w)[0]["k"], content(plain)[0]["k"]
    assert replace(ours, opened_at=0, closed_at=0) == replace(theirs, opened_at=0, closed_at=0)

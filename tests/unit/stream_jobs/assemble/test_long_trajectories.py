"""Very long trajectories: memory at closing, the length limit, and lookups."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_step
from support.admit import SOURCE, cand, policy
from support.assemble import (
    ANONYMOUS_KEY,
    LIMITS,
    InMemoryPartition,
    curation,
    reward,
    session,
    step,
)

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import agent_key
from clawstream.schemas.records import Place, ReadyBatch, Tag, Tick
from clawstream.schemas.tokens import pack_ids
from clawstream.stream_jobs.admit.decisions.journal import InputRecord
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.assemble.matching import token_prefix
from clawstream.stream_jobs.assemble.matching.token_prefix import match_prefix
from clawstream.stream_jobs.assemble.payload.segment_tree import _Branch, prompt_of
from clawstream.stream_jobs.assemble.state.encoding import decoder, encode
from clawstream.stream_jobs.assemble.state.steps import OpenStep, OpenSteps
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, OpenTrajectory
from clawstream.trainer.data.sequences import sequences_of

AGENT = agent_key("codex", b"", "s")
SHORT = replace(LIMITS, steps_max=3)


@pytest.mark.slow
def test_a_closing_takes_the_memory_of_the_tokens_and_not_of_the_prompts() -> None:
    """300 turns of 200 tokens: 36 MB of prompts, 240 KB of unique tokens."""
    history, w, asked = list[int](), InMemoryPartition(), 0
    for n in range(300):
        history += [7] * 150
        w.decide([(STEPS, n, n, step("k", n, history, [n] * 50))])
        asked += 4 * len(history)
        history += [n] * 50
    unique = w.state.opened["r", "k"].steps.size
    w.decide([(STEPS, 300, 300, session("k", "completed"))])
    tracemalloc.start()
    w.emit()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * unique < asked / 10
    t = w.trajectories["k"]
    assert prompt_of(t.segments, t.steps[-1].segment or 0) == pack_ids(history[:-50])


@pytest.mark.slow
def test_a_closing_leaves_nothing_behind_that_only_a_search_for_cycles_finds() -> None:
    w, history = InMemoryPartition(), [1, 2, 3]
    for n in range(20):
        w.decide([(STEPS, n, n, step("k", n, history + ([n] if n % 3 else []), [n] * 5))])
        history += [n] * 5
    w.decide([(STEPS, 20, 20, session("k", "completed"))])
    gc.collect()
    gc.disable()
    try:
        w.emit()
        assert [b for b in gc.get_objects() if type(b) is _Branch] == []
    finally:
        gc.enable()
    assert len(w.trajectories["k"].steps) == 20


def test_the_step_that_fills_a_trajectory_closes_it_and_what_follows_is_late() -> None:
    w = InMemoryPartition(SHORT).feed(
        *((REWARDS, 1, reward("k", 0.5, n, name=f"n{n}")) for n in (2, 3))
    )
    w.feed(
        *((STEPS, 1 + n, step("k", n)) for n in range(5)),
        (STEPS, 9, step("k", 2)),
        (STEPS, 9, step("k", 3)),
    )
    w.feed((STEPS, 10, session("k", "completed")))
    t = w.trajectories["k"]
    assert (t.outcome, t.reason, t.closed_at) == ("timed_out", "full: 3 steps", 3)
    assert [s.step_id for s in t.steps] == ["k~C0.0", "k~C1.0", "k~C2.0"]
    assert [(m.step_id, m.kind) for m in w.marks] == [("k~C3.0", "late"), ("k~C4.0", "late")]
    assert [(r.step_id, r.value) for r in w.last("k").rewards] == [("k~C2.0", 0.5)], (
        "it waited for the last step"
    )
    w.feed((REWARDS, 10, reward("k", 0.7, n=0)))
    assert [r.value for r in w.last("k").rewards] == [0.7, 0.5]


@pytest.mark.parametrize("key", [AGENT, ANONYMOUS_KEY])
@pytest.mark.parametrize("disturbed", ["", "crash", "snapshot"])
def test_behind_a_full_one_the_next_call_begins_the_next_trajectory(
    key: str, disturbed: str
) -> None:
    tokens, w = [1], InMemoryPartition(SHORT)
    for n in range(7):
        w.feed((STEPS, n, step(key, n, tokens, [2 + n])))
        tokens = [*tokens, 2 + n, 1]
        if disturbed == "snapshot":
            w.snapshot()
        if disturbed:
            w.crash()
    w.feed((STEPS, 8, replace(step(key, 2), step_id=f"{key}~C2.1", choice_index=1)))
    w.feed((STEPS, 5000, step(key, 9)))
    found = {t: (w.trajectories[t].outcome, len(w.trajectories[t].steps)) for t in w.trajectories}
    assert found == {
        f"{key}~C0": ("timed_out", 3), f"{key}~C3": ("timed_out", 3), f"{key}~C6": ("completed", 1),
    }  # fmt: skip
    assert [m.step_id for m in w.marks] == [f"{key}~C2.1"], (
        "another choice of a call that a full one has"
    )


def test_a_trajectory_has_a_bounded_payload() -> None:
    w = InMemoryPartition(replace(LIMITS, payload_max=10_000))
    w.feed(*((STEPS, n, step("k", n, [1], [2] * 500)) for n in range(4)))
    t = w.trajectories["k"]
    assert (t.outcome, len(t.steps)) == ("timed_out", 3) and str(t.reason).endswith(
        "bytes of payload"
    )


@pytest.mark.slow
def test_long_ones_that_have_closed_take_no_more_memory_than_short_ones() -> None:
    w = InMemoryPartition(replace(LIMITS, closed_max=15))
    for i in range(10):
        w.feed(
            *((STEPS, i, step(f"k{i}", n)) for n in range(300)),
            (STEPS, i, session(f"k{i}", "completed")),
        )
    w.feed((STEPS, 10, Tick(partition=0)))
    assert [key for _, key in w.state.closed] == [f"k{i}" for i in range(5, 10)]
    assert 10 * 4096 < sum(len(encode(w.state.closed[key])) for key in w.state.closed) < 15 * 4096


@pytest.mark.slow
def test_one_of_thousands_of_steps_is_trained() -> None:
    """Follow thousands of steps with the longest key from assemble to the trainer's rows.

    A user excludes every tenth step, a tag of the gateway excludes one. The conversation is
    compacted every 100 steps.
    """
    key, count = "k" * 200, 2500
    ids = [f"{key}~{n:026d}.0" for n in range(count)]
    title, w, prompt = (Tag(name="title", evidence="e"),), InMemoryPartition(), [0]
    for n in range(count):
        made = step(
            key,
            n,
            prompt,
            [n, n],
            step_id=ids[n],
            call_id=ids[n][:-2],
            tags=title if n == 7 else (),
        )
        w.decide([(STEPS, n, n, made)])
        prompt = [*prompt, n, n, 1] if n % 100 < 99 else [0, n]
    w.decide([(STEPS, count, count, session(key, "completed"))])
    w.emit()
    marks = (
        (REWARDS, n, replace(curation(key, f"e{n}", trainable=False), step_id=ids[n]))
        for n in range(0, count, 10)
    )
    w.feed((REWARDS, 1, reward(key, 0.5)), *marks)
    w.feed(*((REWARDS, n, replace(reward(key, n / count), step_id=ids[n])) for n in range(count)))

    last = w.last(key)
    found, place = (
        Codec().decode(Codec().encode(last)),
        Place(topic_id="T", partition=0, first_offset=0, last_offset=9),
    )
    admission = AdmissionFold("r", "train", SOURCE)
    of_run = policy(required_rewards=("env",), untrained_tags=("title",), drop_zero_variance=False)
    log = [of_run, found, cand("other", key, rewards=found.rewards[:1])]
    decided = [d for i, e in enumerate(log) for d in admission.fold(InputRecord(i, e, place))]
    (batch,) = (d for d in decided if isinstance(d, ReadyBatch))
    (member,) = (m for m in batch.groups[0].members if m.trajectory_id == key)
    left_out = {*ids[::10], ids[7]}
    assert (set(member.untrainable_steps), len(member.rewards)) == (left_out, 1 + count)
    assert member.trainable_tokens == 2 * (count - len(left_out)) == 2 * 2249

    rows = sequences_of(w.trajectories[key], member.untrainable_steps)
    trained = [t for row in rows for t in row.tokens.trained().ids.tolist()]
    assert sorted(trained) == sorted(
        n for n in range(count) if ids[n] not in left_out for _ in range(2)
    )


# ---------------------------------------------------------------- lookups


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[list[int], list[int], str]]:
    """Draw the prompt, response and status of each step.

    A step extends an earlier step, its prompt or a part of its prompt, or starts a new prompt.
    """
    made: list[tuple[list[int], list[int], str]] = []
    token = st.integers(0, 1)
    for _ in range(draw(st.integers(1, 14))):
        prompt, response = draw(st.lists(token, max_size=3)), draw(st.lists(token, max_size=2))
        if made:
            asked, said, _ = draw(st.sampled_from(made[-4:]))
            cut = draw(st.integers(0, len(asked)))
            prompt = draw(
                st.sampled_from(
                    [prompt, asked, asked + prompt, asked + said + prompt, asked[:cut] + prompt]
                )
            )
        made.append((prompt, response, draw(st.sampled_from(["ok", "ok", "ok", "aborted"]))))
    return made


@pytest.mark.slow
@given(conversations(), st.sampled_from([1, 3, 16]))
def test_where_a_step_goes_on_from_is_what_a_look_at_all_steps_finds(
    made: Any, recent: int
) -> None:
    steps, whole = OpenSteps(), list[tuple[list[int], list[int]]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_prefix, "RECENT", recent)
        for n, (prompt, response, status) in enumerate(made):
            found = match_prefix(steps, step("k", n, prompt, response))
            begins = [len(p + r) if r and prompt[: len(p + r)] == p + r else 0 for p, r in whole]
            longest = max(begins, default=0)
            equal = [i for i, end in enumerate(begins) if end == longest and end]
            base = max(equal, key=lambda i: (steps[i].retried is None, i), default=None)
            assert found.base == base
            left = [
                p
                for p, r in whole
                if r and max(longest, 1) <= len(p) < len(prompt) and prompt[: len(p)] == p
            ]
            assert found.diverges == (bool(left) and base != len(steps) - 1)
            size = (len(prompt), len(response))
            steps.append(
                OpenStep(
                    n,
                    n,
                    f"C{n}.0",
                    *size,
                    base,
                    found.end_hash,
                    status,
                    None,
                    None,
                    None,
                    0,
                    found.prompt_hash,
                )
            )
            whole.append((prompt, response))
            if status != "ok" and n:
                steps[n - 1] = replace_step(steps[n - 1], retried=n)


@given(conversations())
def test_what_is_looked_up_is_the_same_when_rebuilt(made: Any) -> None:
    w = InMemoryPartition()
    for n, (prompt, response, status) in enumerate(made):
        w.feed(
            (STEPS, n, step("k", n, prompt, response, status=status, idempotency_key=f"i{n % 3}"))
        )
    trajectory = w.state.opened["r", "k"]
    again = decoder(OpenTrajectory).decode(encode(trajectory))
    assert again == trajectory
    assert all(
        getattr(again.steps, name) == getattr(trajectory.steps, name)
        for name in OpenSteps.__slots__
    )

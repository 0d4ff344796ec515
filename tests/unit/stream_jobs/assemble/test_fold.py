"""The fold of assemble: a list of records in, a list of outputs out."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from support.assemble import LIMITS, InMemoryPartition, curation, reward, session, step

from clawstream.schemas.records import Tick
from clawstream.stream_jobs.assemble import fold as fold_module
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.handlers.rejected import RejectedRecord
from clawstream.stream_jobs.assemble.state import annotations
from clawstream.stream_jobs.assemble.state.changes import PayloadLost
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS


def test_steps_and_rewards_become_a_trajectory_and_a_candidate() -> None:
    w = InMemoryPartition().feed(
        (
            STEPS,
            10,
            session(
                "k",
                "opened",
                group_id="g",
                group_size=4,
                metadata_json=b'{"gold":1}',
                channel="val",
            ),
        ),
        (STEPS, 11, step("k", 0, [1, 2], [3])),
        (REWARDS, 12, reward("k", 0.5)),
        (STEPS, 13, step("k", 1, [1, 2, 3, 4], [5, 6])),
        (STEPS, 14, session("k", "completed")),
    )
    t = w.trajectories["k"]
    assert (t.group_id, t.group_size, t.channel, t.outcome, t.opened_at, t.closed_at) == (
        "g",
        4,
        "val",
        "completed",
        10,
        14,
    )
    assert t.metadata_json == b'{"gold":1}'
    assert [
        (s.step_id, s.index, s.parent, s.drift, s.trainable, s.oldest_version) for s in t.steps
    ] == [
        ("k~C0.0", 0, None, "root", True, "r/3.0"), ("k~C1.0", 1, 0, "clean", True, "r/3.0"),
    ]  # fmt: skip
    assert [(s.parent, s.step_index) for s in t.segments] == [
        (None, None),
        (0, 0),
        (1, None),
        (2, 1),
    ]
    c = w.last("k")
    assert (c.revision, c.prompt_tokens, c.trainable_tokens, c.oldest_sync_index, c.trainable) == (
        0,
        3,
        3,
        3,
        True,
    )
    assert [(r.source, r.name, r.value, r.step_id) for r in c.rewards] == [("env", "a", 0.5, None)]


def test_later_rewards_and_marks_make_revisions_and_equal_ones_do_not() -> None:
    w = InMemoryPartition().feed((STEPS, 1, step("k", 0)), (STEPS, 2, session("k", "completed")))
    w.feed((REWARDS, 3, reward("k", 0.1)))
    # A retry of the first reward, and a later reward of the same revision.
    w.feed((REWARDS, 4, reward("k", 0.1)), (REWARDS, 4, reward("k", 0.9)))
    w.feed((REWARDS, 5, reward("k", 0.7, revision=1)))
    w.feed((REWARDS, 6, curation("k", "c1", trainable=False, tags=("bad",))))
    w.feed(
        (REWARDS, 7, curation("k", "c2", trainable=True)),
        (REWARDS, 8, curation("k", "c1", trainable=False)),
    )
    assert [
        (k[1], c.rewards[0].value if c.rewards else None, c.trainable)
        for k, c in w.candidates.items()
    ] == [
        (0, None, True), (1, 0.1, True), (2, 0.7, True), (3, 0.7, False), (4, 0.7, True),
    ]  # fmt: skip
    assert w.last("k").tags == ("bad",)


def test_no_reward_is_not_zero_and_step_rewards_name_their_step() -> None:
    w = InMemoryPartition().feed(
        (STEPS, 1, step("k", 0)), (REWARDS, 1, reward("k", None)),
        (REWARDS, 1, reward("k", 0.2, n=0)),
        (REWARDS, 1, curation("k", "c", n=0, trainable=False, quality=0.5)),
        (STEPS, 2, session("k", "failed", reason="gave up")),
    )  # fmt: skip
    c = w.last("k")
    assert [(r.step_id, r.value) for r in c.rewards] == [(None, None), ("k~C0.0", 0.2)]
    assert (c.outcome, c.trainable, c.reason) == ("failed", False, "no trainable step")
    assert (c.steps[0].reason, c.steps[0].quality) == ("curation", 0.5)
    assert w.trajectories["k"].reason == "gave up"


def test_tick_past_the_limit_closes_first_and_the_step_after_it_is_late() -> None:
    w = InMemoryPartition().feed((STEPS, 0, step("k", 0)), (STEPS, 1000, Tick(partition=0)))
    assert not w.trajectories
    w.feed((STEPS, 1001, step("k", 1)), (STEPS, 1001, step("k", 1)))
    assert (w.trajectories["k"].outcome, w.trajectories["k"].closed_at) == ("timed_out", 1001)
    assert [(m.step_id, m.kind, m.offset) for m in w.marks] == [("k~C1.0", "late", 2)]
    assert len(w.trajectories["k"].steps) == 1


SILENT = replace(LIMITS, silent_after=100)


def test_what_a_gateway_spooled_while_kafka_was_away_is_not_late() -> None:
    """The first tick after an outage has the length of the outage.

    The spooled records follow in their order.
    """
    w = InMemoryPartition(limits=SILENT).feed(
        (STEPS, 0, step("k", 0)), (STEPS, 50, Tick(partition=0))
    )
    w.feed((STEPS, 10**7, Tick(partition=0)))
    w.crash()
    w.feed((STEPS, 10**7 + 5, step("k", 1)), (STEPS, 10**7 + 6, session("k", "completed")))
    t = w.trajectories["k"]
    assert (t.outcome, len(t.steps), w.marks) == ("completed", 2, [])


def test_after_a_silence_time_goes_on_where_it_stood() -> None:
    w = InMemoryPartition(limits=SILENT).feed((STEPS, 0, step("k", 0)), (REWARDS, 0, reward("x")))
    w.feed(*((STEPS, t, Tick(partition=0)) for t in range(100, 401, 100)))
    w.feed((STEPS, 90_000, Tick(partition=0)))  # only 100 ms of the silence count
    assert not w.trajectories and not w.dead_letters
    w.feed((STEPS, 90_001, Tick(partition=0)))
    assert [b.reason for b in w.dead_letters] == ["unknown_target"]
    w.feed(*((STEPS, t, Tick(partition=0)) for t in range(90_100, 90_501, 100)))
    assert not w.trajectories
    w.feed((STEPS, 90_501, Tick(partition=0)))
    assert (w.trajectories["k"].outcome, w.trajectories["k"].closed_at) == ("timed_out", 90_501)


def test_a_brokers_clock_that_jumps_ahead_closes_nothing() -> None:
    w = InMemoryPartition(limits=SILENT).feed(
        (STEPS, 0, step("k", 0)), (STEPS, 10**9, step("k", 1))
    )
    w.feed((STEPS, 10**9 + 1, session("k", "completed")))
    assert len(w.trajectories["k"].steps) == 2


def test_silences_are_forgotten_once_nothing_can_wait_since_before_them() -> None:
    limits = replace(SILENT, closed_horizon=2000, anonymous_inactivity=2000, agent_inactivity=2000)
    w = InMemoryPartition(limits=limits)
    times = [t for n in range(50) for t in (n * 10_000, n * 10_000 + 50)]
    w.feed(*((STEPS, t, Tick(partition=0)) for t in times))
    assert 10 < len(w.state.silences.starts) < 30
    w.feed((STEPS, 500_000, step("k", 0)))
    w.crash()
    assert w.state.silences.elapsed(490_050, 500_000) == 100
    ticks = [(STEPS, t, Tick(partition=0)) for t in range(500_100, 501_101, 100)]
    w.feed(*ticks)
    assert (w.trajectories["k"].outcome, w.trajectories["k"].closed_at) == ("timed_out", 501_100)


def test_time_on_rewards_closes_nothing() -> None:
    w = InMemoryPartition().feed((STEPS, 0, step("k", 0)), (REWARDS, 99_999, Tick(partition=0)))
    assert not w.trajectories and w.state.event_time == 0


def test_reward_waits_for_its_target_then_is_dead_lettered() -> None:
    w = InMemoryPartition().feed(
        (REWARDS, 0, reward("k", 0.3)),
        (REWARDS, 0, reward("k", 0.4, n=1)),
        (REWARDS, 0, reward("x")),
    )
    w.feed((STEPS, 10, step("k", 0)), (STEPS, 20, session("k", "completed")))
    assert [r.value for r in w.last("k").rewards] == [0.3]
    assert not w.dead_letters
    w.feed((STEPS, 501, Tick(partition=0)))
    assert [(b.source, b.offset, b.reason) for b in w.dead_letters] == [
        (REWARDS, 1, "unknown_target"),
        (REWARDS, 2, "unknown_target"),
    ]
    assert not w.state.waiting_for


def test_a_step_meets_those_that_wait_for_it_in_the_order_of_their_log_and_looks_at_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = InMemoryPartition()
    w.feed(*((REWARDS, 0, reward("k", 0.1, n=1000 + i)) for i in range(50)))
    w.feed(*((STEPS, 0, session("k", "completed", f"e{i}")) for i in range(50)))
    late = [(n, name) for name in ("b", "a") for n in (0, None, 1)]
    w.feed(*((REWARDS, 0, reward("k", 0.5, n=n, name=name)) for n, name in late))
    w.crash()
    tried: list[int] = []
    find = fold_module.target_of

    def counted(*args: Any) -> Any:
        tried.append(0)
        return find(*args)

    monkeypatch.setattr(fold_module, "target_of", counted)
    w.feed((STEPS, 1, step("k", 0)), (STEPS, 1, step("k", 1)))
    assert len(tried) < 50, "as many looks as rewards that wait for other steps"
    folded = w.state.opened["r", "k"].annotations
    assert [(r.step_suffix, r.name) for r in folded.rewards] == [
        ("C0.0", "b"), (None, "b"), ("C0.0", "a"), (None, "a"), ("C1.0", "b"), ("C1.0", "a"),
    ]  # fmt: skip
    assert len(w.state.waiting[REWARDS]) == 50 and len(w.state.waiting[STEPS]) == 50


def test_rewards_and_marks_of_a_trajectory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "REWARDS_MAX", 3)
    monkeypatch.setattr(annotations, "MARKS_MAX", 2)
    w = InMemoryPartition().feed(
        (STEPS, 0, step("k", 0)), *((REWARDS, 0, reward("k", 0.1, name=f"n{i}")) for i in range(2))
    )
    # These rewards wait for their step.
    w.feed(*((REWARDS, 0, reward("k", 0.2, n=1, name=f"w{i}")) for i in range(2)))
    w.feed((STEPS, 0, step("k", 1)), (STEPS, 1, session("k", "completed")))
    w.feed(*((REWARDS, 2, curation("k", f"e{i}", quality=i / 10)) for i in range(4)))
    w.feed(
        (REWARDS, 2, reward("k", 0.9, name="n9")),
        (REWARDS, 2, reward("k", 0.7, name="n0", revision=1)),
    )
    w.feed(
        (REWARDS, 2, reward("k", 0.1, name="n1")), (REWARDS, 2, curation("k", "e0", quality=0.0))
    )
    assert [(b.offset, b.reason) for b in w.dead_letters] == [
        (o, "too_many_rewards") for o in (3, 6, 7, 8)
    ]
    assert (
        "trajectory k of run r has 3 rewards" in w.dead_letters[0].detail
        and "2 curation marks" in w.dead_letters[1].detail
    )
    last = w.last("k")
    assert [(r.name, r.value) for r in last.rewards] == [("n0", 0.7), ("n1", 0.1), ("w0", 0.2)]
    assert last.quality == 0.1
    w.crash()
    assert not w.state.waiting_for and len(w.state.closed["r", "k"].annotations.rewards) == 3


def test_early_completion_leaves_time_for_spooled_steps() -> None:
    w = InMemoryPartition().feed(
        (STEPS, 0, session("k", "completed")), (STEPS, 0, session("x", "completed"))
    )
    w.feed(
        (STEPS, 100, step("k", 0)),
        (STEPS, 101, session("k", "completed")),
        (STEPS, 102, step("k", 1, [1, 2], [3])),
    )
    assert not w.trajectories
    w.feed((STEPS, 501, Tick(partition=0)))
    assert [(t.outcome, len(t.steps)) for t in w.trajectories.values()] == [("completed", 2)]
    assert [(b.source, b.offset, b.reason) for b in w.dead_letters] == [
        (STEPS, 1, "unknown_target")
    ]


def test_what_cannot_be_folded_is_dead_lettered_and_changes_nothing() -> None:
    w = InMemoryPartition().feed(
        (STEPS, 0, RejectedRecord("undecodable", "no header")),
        (STEPS, 0, reward("k")),
        (STEPS, 0, step("k", 0, prompt_token_ids=b"123")),
        (STEPS, 0, step("k", 0, step_id="other~C0.0")),
        (STEPS, 0, step("k", 0, run_id="NO")),
        (REWARDS, 0, reward("k", float("nan"))),
        (REWARDS, 0, reward("k", -sys.float_info.max)),
        (REWARDS, 0, curation("k", "c", quality=1.5)),
        (REWARDS, 0, step("k", 0)),
    )
    assert [(b.source, b.offset, b.reason) for b in w.dead_letters] == [
        (STEPS, 0, "undecodable"), *((STEPS, i, "invalid") for i in range(1, 5)),
        *((REWARDS, i, "invalid") for i in range(4)),
    ]  # fmt: skip
    assert not w.state.opened and w.state.applied == [4, 3]
    fold = AssemblyFold(PartitionState(), LIMITS)
    fold.record(STEPS, 0, 0, b"wrong key", step("k", 0))
    assert [b.reason for b in fold.state.pending.dead_letters] == ["invalid"]


def test_horizon_and_bound_forget_the_oldest() -> None:
    limits = replace(LIMITS, closed_horizon=2000, closed_max=2)
    w = InMemoryPartition(limits).feed(
        *[
            (STEPS, i, e)
            for i in range(3)
            for e in (step(f"k{i}", 0), session(f"k{i}", "completed"))
        ]
    )
    # The bound never removes trajectories of the current batch.
    assert [k[1] for k in w.state.closed] == ["k0", "k1", "k2"]
    w.feed((STEPS, 10, Tick(partition=0)))
    assert [k[1] for k in w.state.closed] == ["k1", "k2"]
    w.feed((STEPS, 2003, Tick(partition=0)), (REWARDS, 2002, Tick(partition=0)))
    assert [k[1] for k in w.state.closed] == ["k2"]
    w.feed((REWARDS, 9000, reward("k2")), (STEPS, 9501, Tick(partition=0)))
    assert [b.reason for b in w.dead_letters] == ["unknown_target"]


def test_of_too_many_that_wait_the_oldest_is_dead_lettered() -> None:
    w = InMemoryPartition(replace(LIMITS, waiting_max=2)).feed(
        *[(REWARDS, 0, reward(f"k{i}")) for i in range(3)]
    )
    assert [b.offset for b in w.dead_letters] == [0]


def test_what_waits_is_bounded_by_bytes_too() -> None:
    tags = tuple(f"{i:02}" + "x" * 198 for i in range(50))
    w = InMemoryPartition(replace(LIMITS, waiting_bytes_max=35_000)).feed(
        *[(REWARDS, 0, curation(f"k{i}", f"c{i}", tags=tags)) for i in range(5)]
    )
    assert [b.offset for b in w.dead_letters] == [0, 1]
    assert w.state.waiting_bytes[REWARDS] <= 35_000
    w.feed(*[(STEPS, 1, step(f"k{i}", 0)) for i in range(5)])
    assert w.state.waiting_bytes == [0, 0]


def test_ends_that_wait_are_bounded_by_bytes_too() -> None:
    rewards = {f"{i:02}" + "x" * 198: 1.0 for i in range(50)}
    w = InMemoryPartition(replace(LIMITS, waiting_bytes_max=35_000)).feed(
        *[(STEPS, 0, session(f"k{i}", "completed")) for i in range(50)],
        *[(STEPS, 0, session(f"l{i}", "completed", rewards=rewards)) for i in range(5)],
    )
    assert w.state.waiting_bytes[STEPS] <= 35_000


def test_of_two_ends_that_wait_for_one_trajectory_the_first_counts() -> None:
    rewards = {f"{i:02}" + "x" * 198: 1.0 for i in range(50)}
    w = InMemoryPartition(replace(LIMITS, waiting_bytes_max=5_000)).feed(
        (STEPS, 0, session("k", "failed")),
        (STEPS, 0, session("k", "completed")),
        (STEPS, 0, step("k", 0)),
        (STEPS, 0, session("late", "completed", rewards=rewards)),
    )
    assert w.last("k").outcome == "failed"
    assert list(w.state.waiting[STEPS]) == [3]


def test_lost_payload_still_gives_a_candidate() -> None:
    w = InMemoryPartition()
    w.decide([(STEPS, 0, 0, step("k", 0)), (STEPS, 1, 1, session("k", "completed"))])
    PayloadLost(("r", "k"), "payload lost to retention").apply(w.state)
    w.payload.clear()
    w.emit()
    assert (w.last("k").outcome, w.last("k").trainable, w.last("k").reason) == (
        "lost",
        False,
        "payload lost to retention",
    )
    assert w.trajectories["k"].segments == () and w.trajectories["k"].steps[0].trainable is False


def test_a_new_topic_closes_what_was_open_as_lost_and_starts_anew() -> None:
    w = InMemoryPartition().feed(
        (STEPS, 5, step("k", 0)), (STEPS, 6, step("j", 0)), (STEPS, 6, session("j", "completed"))
    )
    w.fold.replace_source(STEPS, "new", 0)
    w.batch([])
    assert (w.last("k").outcome, w.last("k").reason) == (
        "lost",
        "claw.steps was replaced by a new topic",
    )
    assert (
        w.state.applied == [-1, -1]
        and w.state.topic_ids == ["new", ""]
        and ("r", "j") not in w.state.closed
    )


def test_dead_letters_due_of_a_recreated_topic_concern_no_record_of_the_new_one() -> None:
    w = InMemoryPartition()
    w.decide(
        [
            (STEPS, 0, 5, RejectedRecord("undecodable", "of steps")),
            (REWARDS, 0, 5, RejectedRecord("undecodable", "of rewards")),
        ]
    )
    w.fold.replace_source(STEPS, "new", 0)
    w.batch([])
    assert [b.detail for b in w.dead_letters] == ["of rewards"]


def test_a_trajectory_has_the_trace_context_of_its_first_call_that_has_one() -> None:
    sent = [f"00-{n * 32}-{'cd' * 8}-01" for n in "ab"]
    steps = [
        (STEPS, 10, step("k", 0, [1], [2])),
        (STEPS, 11, replace(step("k", 1, [1, 2, 3], [4]), traceparent="no context", group_id="g")),
        (STEPS, 12, replace(step("k", 2, [1, 2, 3, 4], [5]), traceparent=sent[0])),
        (STEPS, 13, replace(step("k", 3, [1, 2, 3, 4, 5], [6]), traceparent=sent[1])),
        (STEPS, 14, session("k", "completed")),
        (STEPS, 15, step("other", 0, [1], [2])),
        (STEPS, 16, session("other", "completed")),
    ]
    w = InMemoryPartition().feed(*steps)
    assert (w.trajectories["k"].traceparent, w.last("k").traceparent) == (sent[0], sent[0])
    assert (w.trajectories["k"].group_id, w.last("other").traceparent) == ("g", None)

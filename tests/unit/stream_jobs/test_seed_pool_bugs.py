"""Regression tests for the measured bugs of Claw-R1's data pool, one for each bug number.

Our pool is two folds: assemble closes trajectories, and admission makes batches of them. These
tests chain both in memory. `gateway/claw_r1/test_claw_r1_bugs.py` tests the pool's API in the
gateway; `integration/test_straggler.py` tests 10,000 groups behind a straggler on a real Kafka.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pytest
from support.assemble import LIMITS, InMemoryPartition, curation, reward, session, step

from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    Late,
    Place,
    ReadyBatch,
    Refused,
    RunEnded,
    Tick,
)
from clawstream.schemas.reward_matching import training_reward
from clawstream.stream_jobs.admit.decisions.journal import CandidateLog, Decision, InputRecord
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.assemble.limits import PAYLOAD_BYTES
from clawstream.stream_jobs.assemble.payload.cache import PayloadCache, payload_of
from clawstream.stream_jobs.assemble.payload.trainability import trainability
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS

PLACE = Place(topic_id="t", partition=0, first_offset=0, last_offset=0)
POLICY: dict[str, Any] = {
    "run_id": "r", "policy_version": 1, "group_size": 2, "min_members": 1,
    "required_rewards": ("env",), "reward_weights": {}, "reward_deadline_ms": 2000,
    "group_deadline_ms": 4000, "max_staleness": None, "drop_zero_variance": False,
    "min_trainable_tokens": 1, "train_outcomes": ("completed",), "batch_groups": 1,
    "sync_every": 1, "val_groups": 1, "val_deadline_ms": 1, "algorithm": "other", "created_at": 0,
}  # fmt: skip


@dataclass
class Pool:
    """Both folds: the outputs of assemble, with their event time, go to admission at once."""

    worker: InMemoryPartition = field(default_factory=InMemoryPartition)
    admission: AdmissionFold = field(
        default_factory=lambda: AdmissionFold("r", "train", CandidateLog("t", 0, 1))
    )
    decided: list[Decision] = field(default_factory=list)
    now: int = 0
    _told: int = 0
    _offset: int = 0

    def policy(self, **changes: Any) -> Pool:
        """Publish a policy, which opens the run or changes its requirements."""
        self.tell(AdmissionPolicy(**{**POLICY, **changes}))
        return self

    def tell(self, event: Any) -> None:
        """Feed one record of the candidates topic to admission."""
        self.decided += self.admission.fold(
            InputRecord(self._offset, event, PLACE if isinstance(event, Candidate) else None)
        )
        self._offset += 1

    def feed(self, *events: Any, at: int | None = None) -> None:
        """Feed records to their topics and the resulting candidates to admission.

        Args:
            at: time of the records and of both topics, in milliseconds.
        """
        self.now = self.now if at is None else at
        on = [
            (REWARDS if type(e).__name__ in ("Reward", "Curation") else STEPS, self.now, e)
            for e in events
        ]
        tick = Tick(partition=0)
        self.worker.feed(*on, (STEPS, self.now, tick), (REWARDS, self.now, tick))
        for made in list(islice(self.worker.candidates.values(), self._told, None)):
            self.tell(made)
        self._told = len(self.worker.candidates)
        self.tell(Tick(partition=0, event_time=self.now))

    def member(self, key: str, group: str, value: float | None = 1.0, **more: Any) -> Iterator[Any]:
        """Yield the records of a complete trajectory, with a reward unless its value is None."""
        yield session(key, "opened", group_id=group, **more)
        yield step(key, 0)
        yield session(key, "completed")
        if value is not None:
            yield reward(key, value)

    @property
    def served(self) -> list[list[str]]:
        """Members of each admitted group, in order."""
        batches = [d for d in self.decided if isinstance(d, ReadyBatch)]
        return [[m.trajectory_id for m in g.members] for b in batches for g in b.groups]

    @property
    def refused(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(d.reason, d.trajectory_ids) for d in self.decided if isinstance(d, Refused)]


@pytest.mark.slow
def test_1_groups_behind_one_that_never_completes_are_served_at_once() -> None:
    """One member became silent, another never made a call.

    1,000 groups are admitted meanwhile, each at the moment when it is full.
    """
    pool = Pool().policy()
    pool.feed(
        *pool.member("done", "slow"),
        session("silent", "opened", group_id="slow"),
        step("silent", 0),
    )
    pool.feed(*pool.member("alone", "lost"))
    for i in range(1000):
        pool.feed(*pool.member(f"a{i}", f"g{i}"), *pool.member(f"b{i}", f"g{i}"), at=1 + i // 2)
        assert pool.served[-1] == [f"a{i}", f"b{i}"]
    assert len(pool.served) == 1000 and pool.refused == []


def test_1_a_trajectory_that_never_completes_times_out_and_its_group_goes_without_it() -> None:
    pool = Pool().policy()
    pool.feed(
        *pool.member("done", "slow"),
        session("silent", "opened", group_id="slow"),
        step("silent", 0),
    )
    pool.feed(*pool.member("alone", "lost"))
    pool.feed(at=LIMITS.trajectory_timeout)
    assert pool.served == [] and "silent" not in pool.worker.trajectories
    pool.feed(at=LIMITS.trajectory_timeout + 1)
    assert pool.worker.trajectories["silent"].outcome == "timed_out"
    assert (pool.served, pool.refused) == ([["done"]], [("outcome", ("silent",))]), (
        "full now: nobody waits for its reward"
    )
    pool.feed(at=POLICY["group_deadline_ms"])
    assert pool.served == [["done"], ["alone"]], (
        "its other member was never heard of: the group's own deadline"
    )
    assert pool.admission.input_from == pool._offset


def test_2_a_late_step_of_a_group_that_was_consumed_opens_no_group() -> None:
    pool = Pool().policy()
    pool.feed(*pool.member("a", "g"), *pool.member("b", "g"))
    assert pool.served == [["a", "b"]]
    pool.feed(step("a", 1), step("b", 1), at=10)
    assert [m.step_id for m in pool.worker.marks] == [
        "a~C1.0",
        "b~C1.0",
    ] and not pool.worker.state.opened
    for i in range(50):
        pool.feed(*pool.member(f"c{i}", f"h{i}"), *pool.member(f"d{i}", f"h{i}"))
    assert len(pool.served) == 51 and pool.admission.input_from == pool._offset


@pytest.mark.slow
def test_3_what_is_held_is_bounded_when_the_trainer_stands_still() -> None:
    """No trainer reads a batch here.

    Decisions are on the topic. The folds and the cache hold open trajectories and a bounded number
    of closed ones.
    """
    small = replace(LIMITS, closed_max=20, waiting_max=20)
    pool = Pool(InMemoryPartition(small)).policy(group_size=1)
    cache, one = PayloadCache(10_000), step("x", 0, range(200), range(50))
    for i in range(600):
        pool.feed(*pool.member(f"k{i}", f"g{i}"), reward(f"nobody{i}", 1.0), at=i)
        cache.put(i, payload_of(one, trainability(one)))
    state = pool.worker.state
    assert len(pool.served) == 600
    assert (
        len(state.opened),
        len(state.closed),
        len(state.waiting[REWARDS]),
        len(state.waiting_for),
    ) == (
        0,
        20,
        20,
        20,
    )
    assert cache.bytes <= 10_000 and len(cache) == 6


@pytest.mark.slow
def test_4_nothing_is_left_of_groups_that_were_consumed() -> None:
    """Only about 50 bytes per decided trajectory remain, so that none is trained twice."""
    pool = Pool(InMemoryPartition(replace(LIMITS, closed_max=20))).policy(group_size=1)
    sizes = []
    for i in range(600):
        pool.feed(
            *pool.member(f"k{i:03}", f"g{i:03}"),
            curation(f"k{i:03}", f"e{i:03}", quality=0.5),
            at=1000 + i,
        )
        if i in (299, 599):
            fold = pool.admission
            held: tuple[Sized, ...] = (
                fold._groups,
                fold._pending,
                fold._batches._open,
                fold._before_policy,
                pool.worker.state.session_indexes,
            )
            sizes.append(
                (
                    len(pool.worker.state.dump()),
                    len(fold._timers._heap) < 1200,
                    [len(h) for h in held],
                )
            )
    assert sizes[0][1:] == sizes[1][1:] == (True, [0] * 5)
    assert abs(sizes[1][0] - sizes[0][0]) < 100, "the state of assemble, as its snapshots have it"


def test_5_one_prompt_that_is_too_long_spoils_no_other_group() -> None:
    pool = Pool().policy(max_trajectory_tokens=100)
    long = [
        session("l", "opened", group_id="g"),
        step("l", 0, range(200)),
        session("l", "completed"),
        reward("l", 1.0),
    ]
    pool.feed(*long, *pool.member("a", "g"))
    pool.feed(*pool.member("b", "h"), *pool.member("c", "h"))
    assert pool.served == [["a"], ["b", "c"]] and pool.refused == [("too_long", ("l",))]


def test_5_a_step_that_no_record_can_hold_is_dead_lettered_and_its_partition_goes_on() -> None:
    pool = Pool().policy(group_size=1)
    pool.feed(step("a", 0, response_json=b"x" * (PAYLOAD_BYTES + 1)))
    pool.feed(*pool.member("b", "h"))
    assert [b.reason for b in pool.worker.dead_letters] == ["invalid"] and pool.served == [["b"]]


@pytest.mark.parametrize(("configured", "opened"), [(5, 1), (1, 3)])
def test_6_a_group_is_served_when_its_own_n_have_come_whatever_n_is_configured(
    configured: int, opened: int
) -> None:
    pool = Pool().policy(group_size=configured)
    for i in range(opened):
        assert pool.served == []
        pool.feed(*pool.member(f"k{i}", "g", group_size=opened))
    assert pool.served == [[f"k{i}" for i in range(opened)]]


def test_6_an_n_that_is_changed_meets_the_groups_that_begin_after_it() -> None:
    pool = Pool().policy(group_size=5)
    pool.feed(*pool.member("a", "g"))
    pool.policy(group_size=1, policy_version=2)
    pool.feed(*pool.member("b", "h"))
    assert pool.served == [["b"]], (
        "one more wake-up than members: the waiting group was opened for five"
    )
    for key in "cdef":
        pool.feed(*pool.member(key, "g"))
    assert pool.served[1:] == [["a", "c", "d", "e", "f"]]


def test_7_the_end_serves_groups_that_are_ready_though_they_fill_no_batch() -> None:
    pool = Pool().policy(batch_groups=9)
    pool.feed(*pool.member("a", "g"), *pool.member("b", "g"), *pool.member("c", "h"))
    pool.tell(RunEnded(run_id="r", created_at=0))
    assert pool.served == [["a", "b"], ["c"]]
    pool.feed(*pool.member("d", "i"))
    assert pool.refused == [("run_ended", ("d",))], "what comes after the end is told so"


def test_8_no_trajectory_is_served_before_it_is_whole() -> None:
    """A group of one has a complete and an open trajectory.

    The open trajectory becomes the next round, with its own reward, when it is complete.
    """
    pool = Pool().policy(group_size=1)
    pool.feed(session("b", "opened", group_id="g"), step("b", 0), *pool.member("a", "g"))
    assert pool.served == [["a"]]
    pool.feed(step("b", 1), session("b", "completed"), reward("b", 0.5))
    (_, second) = (d for d in pool.decided if isinstance(d, ReadyBatch))
    (member,) = second.groups[0].members
    assert (second.groups[0].round, member.trajectory_id, [r.value for r in member.rewards]) == (
        1,
        "b",
        [0.5],
    )
    assert len(pool.worker.trajectories["b"].steps) == 2


def test_8_what_was_dropped_in_the_middle_does_not_come_back_without_its_beginning() -> None:
    pool = Pool().policy(group_size=1, min_members=1)
    pool.feed(session("a", "opened", group_id="g"), step("a", 0))
    pool.feed(at=LIMITS.trajectory_timeout + 1)
    assert pool.refused == [("outcome", ("a",))]
    pool.feed(step("a", 1), session("a", "completed", "later"), reward("a", 1.0))
    assert pool.served == [] and pool.refused == [("outcome", ("a",))]
    assert len(pool.worker.trajectories["a"].steps) == 1 and [
        m.kind for m in pool.worker.marks
    ] == ["late"]
    assert [d.revision for d in pool.decided if isinstance(d, Late)] == [1]


def test_9_what_is_sent_twice_is_there_once_even_long_after_it_was_trained() -> None:
    pool = Pool().policy(group_size=1)
    whole = list(pool.member("a", "g"))
    for at in (0, 500, 5000):
        pool.feed(*whole, *whole, at=at)
    assert pool.served == [["a"]] and pool.refused == [] and pool.worker.marks == []
    assert [len(t.steps) for t in pool.worker.trajectories.values()] == [1]


def test_9_a_missing_reward_next_to_one_that_is_there_is_not_zero() -> None:
    pool = Pool().policy()
    pool.feed(*pool.member("a", "g", 1.0), *pool.member("b", "g", None))
    assert pool.served == [], "it waits for the reward"
    pool.feed(at=POLICY["reward_deadline_ms"])
    assert pool.served == [["a"]] and pool.refused == [("reward_missing", ("b",))]
    optional = Pool().policy(required_rewards=())
    optional.feed(*optional.member("b", "g", None), *optional.member("a", "g", 1.0))
    (batch,) = (d for d in optional.decided if isinstance(d, ReadyBatch))
    rewards = {m.trajectory_id: training_reward({}, m.rewards) for m in batch.groups[0].members}
    assert rewards == {"a": 1.0, "b": None}


@pytest.mark.slow
def test_10_a_step_costs_the_same_after_many_others() -> None:
    """Count function calls per step in both folds: unlike time, they do not vary by machine."""
    pool = Pool(InMemoryPartition(replace(LIMITS, closed_max=500))).policy(group_size=1)
    calls = [0, 0]

    def count(_frame: Any, event: str, _arg: Any) -> None:
        calls[half] += event in ("call", "c_call")

    for i in range(600):  # fills the bounded stores
        pool.feed(*pool.member(f"before{i}", f"h{i}"), at=i)
    for half in (0, 1):
        members = [list(pool.member(f"k{half}-{i:03}", f"g{half}-{i:03}")) for i in range(300)]
        sys.setprofile(count)
        try:
            for i, member in enumerate(members):
                pool.worker.feed(
                    *(
                        (REWARDS if type(e).__name__ == "Reward" else STEPS, 600 + i, e)
                        for e in member
                    )
                )
        finally:
            sys.setprofile(None)
        for made in list(islice(pool.worker.candidates.values(), pool._told, None)):
            pool.tell(made)
        pool._told = len(pool.worker.candidates)
    assert len(pool.served) == 1200 and calls[0] > 10_000
    assert abs(calls[1] - calls[0]) < 0.01 * calls[0]


@pytest.mark.slow
def test_11_a_pool_that_dies_has_lost_nothing() -> None:
    """Assemble is killed before and after its outputs, with many open trajectories.

    `admit/test_recovery.py` tests that admission reads its own output again.
    """
    pool = Pool().policy()
    keys = [f"{side}{i}" for i in range(100) for side in "ab"]
    for key in keys:
        pool.worker.feed(
            *((STEPS, 1, e) for e in (session(key, "opened", group_id=f"g{key[1:]}"), step(key, 0)))
        )
    pool.worker.crash()
    assert len(pool.worker.state.opened) == len(keys)
    ends = [event for key in keys for event in (session(key, "completed"), reward(key, 1.0))]
    for first in range(0, len(ends), 40):
        pool.worker.decide(
            [(REWARDS if i % 2 else STEPS, pool.worker._offset(REWARDS if i % 2 else STEPS), 2, e)
             for i, e in enumerate(ends[first : first + 40])]
        )  # fmt: skip
        pool.worker.crash()
    pool.feed()
    assert sorted(t for g in pool.served for t in g) == sorted(keys) and len(pool.served) == 100

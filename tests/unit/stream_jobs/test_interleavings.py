"""The outputs do not depend on interleaving, duplicates, batch boundaries or crashes.

`support.interleavings` has the input topics and the crashing owner. The tests compare the outputs
of one partition with a plain run, which reads all steps, then all rewards, one by one, without
crashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from support.assemble import (
    ANONYMOUS_KEY,
    InMemoryPartition,
    chat_step,
    curation,
    reward,
    session,
    step,
)
from support.examples import examples
from support.interleavings import (
    AGENT,
    LIMITS,
    WITH_REWARD,
    Logs,
    Rig,
    chaos,
    disturbed,
    duplicated,
    full_rounds,
    plainly,
    with_gaps,
)

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
from clawstream.schemas.records.rewards import COMPLETION_NAME
from clawstream.stream_jobs.admit.decisions.journal import (
    CandidateLog,
    InputRecord,
    Invalid,
    JournalRecord,
)
from clawstream.stream_jobs.admit.decisions.state import resume_from_journal
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS

SEED = st.integers(0, 2**32)
SOURCE = CandidateLog("t", 0, 2)
PLACE = Place(topic_id="t", partition=0, first_offset=0, last_offset=0)
PATIENT = Limits(
    trajectory_timeout=50_000, closed_horizon=10_000_000, orphan_after=5_000_000, closed_max=10_000,
    anonymous_inactivity=900, agent_inactivity=1500,
)  # fmt: skip
POLICY: dict[str, Any] = {
    "policy_version": 1, "group_size": 1, "min_members": 1, "required_rewards": ("env",),
    "reward_weights": {}, "reward_deadline_ms": 10**9, "group_deadline_ms": 10**9,
    "max_staleness": None, "drop_zero_variance": False, "min_trainable_tokens": 1,
    "train_outcomes": ("completed", "failed"), "sync_every": 1, "val_groups": 1,
    "val_deadline_ms": 1, "algorithm": "other", "created_at": 0,
}  # fmt: skip


def both(logs: Logs, rng: Random, limits: Limits = LIMITS) -> tuple[Rig, Rig]:
    """Run the topics plainly, and with duplicates, crashes and any interleaving.

    The plain run has a tick in place of each duplicate.
    """
    gapped, gaps = with_gaps(logs, rng, rng.randint(0, 8))
    plain = plainly(gapped, limits)
    dead_lettered = {(source, offset) for source, offset, _ in plain.dead_letters}
    return plain, disturbed(duplicated(gapped, gaps, dead_lettered, rng), rng, limits)


@pytest.mark.slow
@how(max_examples=examples(100))
@given(seed=SEED, length=st.integers(1, 60))
def test_any_interleaving_duplicates_batches_and_kills_give_the_same(
    seed: int, length: int
) -> None:
    """Compare trajectories, last revisions, late marks and dead letters.

    Each late mark occurs once, and no late step is in a trajectory. The first revision has the
    reward of the completion.
    """
    rng = Random(seed)
    plain, other = both(
        chaos(rng, length), rng, replace(LIMITS, steps_max=rng.choice([2, 5, 5000]))
    )
    assert other.trajectories == plain.trajectories
    assert other.last() == plain.last()
    for key, ended in other.trajectories.items():
        first = {r.name for r in other.revisions[key][0].rewards if r.step_id is None}
        assert ended.reason != WITH_REWARD or COMPLETION_NAME in first
    assert other.marks == plain.marks and other.dead_letters == plain.dead_letters
    held = {(key[0], s.step_id) for key, t in other.trajectories.items() for s in t.steps}
    late = [(key[0], step_id) for key, step_id, kind, _ in other.marks if kind == "late"]
    assert len(set(late)) == len(late) and held.isdisjoint(late)


# ---------------------------------------------------------------- with admission


def candidates_log(rigs: Iterable[Rig], rng: Random) -> list[InputRecord]:
    """Return a candidates topic.

    It keeps the order within each partition, has the policies at any position and ends with both
    runs' ends.
    """
    queues = [list(rig.sent) for rig in rigs]
    events: list[Any] = []
    while any(queues):
        events.append(rng.choice([q for q in queues if q]).pop(0))
    for run in ("r", "s"):
        made = AdmissionPolicy(run_id=run, batch_groups=rng.randint(1, 3), **POLICY)
        events.insert(rng.randint(0, len(events)), made)
    for partition in (0, 1):
        events.insert(rng.randint(0, len(events)), Tick(partition=partition, event_time=5))
    events += [RunEnded(run_id=run, created_at=0) for run in ("r", "s")]
    return [
        InputRecord(i, e, PLACE if isinstance(e, Candidate) else None) for i, e in enumerate(events)
    ]


def admitted(log: list[InputRecord], run: str, rng: Random) -> list[JournalRecord]:
    """Return the journal of a run whose admission is killed before or after it writes decisions."""
    journal: list[JournalRecord] = []
    state, at, lives = AdmissionFold(run, "train", SOURCE), 0, rng.choice([0, 0, 3])
    while at < len(log):
        decided = state.fold(log[at])
        assert not any(isinstance(d, Invalid) for d in decided)
        killed = lives > 0 and rng.random() < 0.2
        if not killed or rng.random() < 0.5:
            journal += [d for d in decided if not isinstance(d, Invalid)]
        at += 1
        if killed:
            lives, at = lives - 1, 0
            state = AdmissionFold(
                run, "train", SOURCE, resume_from_journal(journal, SOURCE.topic_id, 0)
            )
    return journal


def groups_of(journal: list[JournalRecord]) -> dict[tuple[str, int], set[str]]:
    """Map group and round to its members; assert that each round occurs once."""
    found = [g for d in journal if isinstance(d, ReadyBatch) for g in d.groups]
    out = {(g.group_id, g.round): {m.trajectory_id for m in g.members} for g in found}
    assert len(out) == len(found)
    return out


def check_revisions(log: list[InputRecord], journal: list[JournalRecord], run: str) -> None:
    """Assert that admission uses the newest revision, marks newer ones late and repeats nothing."""
    seen = [
        (e.offset, e.event) for e in log if isinstance(e.event, Candidate) and e.event.run_id == run
    ]
    late = [d for d in journal if isinstance(d, Late)]
    trained = set[str]()
    for batch in (d for d in journal if isinstance(d, ReadyBatch)):
        for member in (m for g in batch.groups for m in g.members):
            assert member.trajectory_id not in trained
            trained.add(member.trajectory_id)
            mine = [(offset, c) for offset, c in seen if c.trajectory_id == member.trajectory_id]
            newest = max(
                (c for offset, c in mine if offset < batch.input_to), key=lambda c: c.revision
            )
            assert (member.revision, member.rewards) == (newest.revision, newest.rewards)
            after = sorted({c.revision for _, c in mine if c.revision > member.revision})
            told = [d for d in late if d.trajectory_id == member.trajectory_id]
            assert [d.revision for d in told] == after
            assert {d.missed_batch_seq for d in told} <= {batch.batch_seq}


@pytest.mark.slow
@how(max_examples=examples(40))
@given(seed=SEED)
def test_full_rounds_give_the_same_groups_however_they_come(seed: int) -> None:
    """Cover the combinations of full rounds.

    There are several runs with the same keys, repeated group ids, named and counted rounds,
    anonymous sessions, agent sessions and choices.
    """
    rng = Random(seed)
    pairs = [both(logs, rng, PATIENT) for logs in full_rounds(rng)]
    plain_log, other_log = (candidates_log(rigs, rng) for rigs in zip(*pairs, strict=True))
    for run in ("r", "s"):
        plain, other = admitted(plain_log, run, Random(0)), admitted(other_log, run, rng)
        assert not [d for d in (*plain, *other) if isinstance(d, Refused)]
        expected, found = groups_of(plain), groups_of(other)
        assert found.keys() == expected.keys()
        assert set.union(set(), *found.values()) == set.union(set(), *expected.values())
        assert {k: len(v) for k, v in found.items()} == {k: len(v) for k, v in expected.items()}
        named = [
            k for k in expected if k[0].startswith("g") and _round_is_named(plain_log, run, k[0])
        ]
        assert all(found[k] == expected[k] for k in named), "a counted round takes who comes first"
        check_revisions(other_log, other, run)


def _round_is_named(log: list[InputRecord], run: str, group: str) -> bool:
    found = [
        e.event
        for e in log
        if isinstance(e.event, Candidate) and (e.event.run_id, e.event.group_id) == (run, group)
    ]
    return all(c.round is not None for c in found)


# ---------------------------------------------------------------- bugs found by the properties


@pytest.mark.parametrize("steps_first", [True, False])
def test_marks_and_rewards_count_in_the_order_of_their_log_though_they_wait_for_different_steps(
    steps_first: bool,
) -> None:
    """Each record names the trajectory by one of its steps.

    The step of the second record exists; the first record waits for its step.
    """
    one, two = step(AGENT, 0), step(AGENT, 1, [1, 2], [3])
    said = [
        replace(curation(AGENT, "x", 1, trainable=False), trajectory_id=AGENT),
        replace(curation(AGENT, "y", 0, trainable=True), trajectory_id=AGENT),
        replace(reward(AGENT, 0.0, 1), trajectory_id=AGENT),
        replace(reward(AGENT, 1.0, 0), trajectory_id=AGENT),
    ]
    worker = InMemoryPartition().feed((STEPS, 1, one))
    rewards = [(REWARDS, 2, event) for event in said]
    worker.feed(*([(STEPS, 2, two), *rewards] if steps_first else [*rewards, (STEPS, 2, two)]))
    worker.feed((STEPS, 3, session(AGENT, "completed", step_id=two.step_id)))
    found = worker.last(f"{AGENT}~C0")
    assert found.trainable and [r.value for r in found.rewards] == [0.0]


def test_of_rewards_for_a_trajectory_and_for_a_step_of_it_the_first_on_the_log_counts() -> None:
    """They wait under different keys: one under the trajectory id, the other under its step."""
    worker = InMemoryPartition().feed(
        (REWARDS, 1, replace(reward(ANONYMOUS_KEY, 0.0, 0), trajectory_id=ANONYMOUS_KEY)),
        (REWARDS, 1, replace(reward(ANONYMOUS_KEY, 1.0), trajectory_id=f"{ANONYMOUS_KEY}~C0")),
        (STEPS, 2, step(ANONYMOUS_KEY, 0)),
    )
    worker.feed((STEPS, 3, session(ANONYMOUS_KEY, "completed", step_id=f"{ANONYMOUS_KEY}~C0.0")))
    assert [r.value for r in worker.last(f"{ANONYMOUS_KEY}~C0").rewards] == [0.0]


def test_offsets_of_a_rewards_topic_that_is_no_more_do_not_count() -> None:
    worker = InMemoryPartition().feed((STEPS, 1, step("a", 0)))
    worker.batch(
        [
            (REWARDS, 90 + i, 2, e)
            for i, e in enumerate([curation("a", "x", trainable=False), reward("a", 0.5)])
        ]
    )
    worker.fold.replace_source(REWARDS, "another", 0)
    worker.batch(
        [
            (REWARDS, i, 3, e)
            for i, e in enumerate(
                [curation("a", "y", trainable=True), reward("a", 0.7, revision=0)]
            )
        ]
    )
    worker.crash()
    worker.batch([(STEPS, 1, 4, session("a", "completed"))])
    assert worker.last("a").trainable and [r.value for r in worker.last("a").rewards] == [0.5]


def test_a_retry_finds_the_same_trajectory_before_and_after_a_snapshot() -> None:
    """Two trajectories match, because the retry has no tokens.

    The first one on the topic is chosen, whichever of the two was active last.
    """
    ask = [{"role": "user", "content": "q"}]
    on = [*ask, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    first = [
        chat_step(0, ask, {"content": "a"}, idempotency_key="k"),
        chat_step(
            1,
            [{"role": "system", "content": "be brief"}, *ask],
            {"content": "b"},
            idempotency_key="k",
        ),
        chat_step(2, on, {"content": "c"}),
    ]
    retry = chat_step(3, ask, {"content": "d"}, tokens=False, idempotency_key="k")
    found = []
    for snapshot in (False, True):
        worker = InMemoryPartition().feed(*((STEPS, i, s) for i, s in enumerate(first)))
        assert len(worker.state.opened) == 2
        if snapshot:
            worker.snapshot()
            worker.crash()
        worker.feed((STEPS, 9, retry))
        found.append(
            {key: [s.step_suffix for s in t.steps] for key, t in worker.state.opened.items()}
        )
    assert found[0] == found[1] == {
        ("r", f"{ANONYMOUS_KEY}~C0"): ["C0.0", "C2.0", "C3.0"],
        ("r", f"{ANONYMOUS_KEY}~C1"): ["C1.0"],
    }  # fmt: skip


def test_a_key_that_is_forgotten_and_closes_again_is_remembered_from_then_on() -> None:
    limits = replace(LIMITS, closed_horizon=100)
    worker = InMemoryPartition(limits).feed(
        (STEPS, 1, step("a", 0)),
        (STEPS, 2, session("a", "completed")),
        (REWARDS, 2, Tick(partition=0)),
    )
    worker.feed((STEPS, 200, Tick(partition=0)), (REWARDS, 200, Tick(partition=0)))
    assert not worker.state.closed
    worker.trajectories.clear()
    worker.candidates.clear()  # its revisions restart at 0: admission refuses them as duplicates
    worker.feed((STEPS, 201, step("a", 1)), (STEPS, 202, session("a", "completed", "again")))
    worker.feed((STEPS, 210, step("a", 2)), (REWARDS, 210, reward("a", 0.5)))
    assert [m.step_id for m in worker.marks] == ["a~C2.0"] and worker.last("a").rewards[
        0
    ].value == 0.5


def test_time_is_as_far_as_what_was_read_after_a_crash() -> None:
    """Ticks alone are not written to the changelog.

    Their time is written with the next other change, so that they are not read again.
    """
    worker = InMemoryPartition().feed(
        (STEPS, 1, step("a", 0)), (STEPS, 2, session("a", "completed"))
    )
    assert worker.unflushed
    worker.decide([(STEPS, 2, 700, Tick(partition=0)), (REWARDS, 0, 600, Tick(partition=0))])
    assert worker.state.applied == [2, 0]
    worker.crash()
    assert (worker.state.applied, worker.state.time) == ([2, 0], [700, 600])


def test_of_candidates_from_before_the_first_policy_the_newest_revision_is_admitted() -> None:
    old = plainly(([(1, step("a", 0)), (2, session("a", "completed"))], [(3, reward("a", 0.0))]))
    first, second = old.sent
    made = AdmissionPolicy(run_id="r", batch_groups=1, **POLICY)
    log = [
        InputRecord(0, replace(first, rewards=second.rewards), PLACE),
        InputRecord(1, second, PLACE),
        InputRecord(2, made),
    ]
    later = replace(second, revision=2)
    state = AdmissionFold("r", "train", SOURCE)
    _, batch, late = (d for e in [*log, InputRecord(3, later, PLACE)] for d in state.fold(e))
    assert isinstance(batch, ReadyBatch) and batch.groups[0].members[0].revision == 1
    assert isinstance(late, Late) and late.revision == 2


def test_no_group_is_admitted_without_the_reward_of_a_completion() -> None:
    """The policy requires no reward, and assemble reads the end before the reward's own record."""
    own = reward("a", 1.0, name=COMPLETION_NAME)
    end = session("a", "completed", rewards={COMPLETION_NAME: 1.0})
    rig = plainly(([(1, step("a", 0)), (2, end)], [(1, own)]))
    made = AdmissionPolicy(run_id="r", batch_groups=1, **(POLICY | {"required_rewards": ()}))
    log = [InputRecord(0, made), *(InputRecord(1 + i, c, PLACE) for i, c in enumerate(rig.sent))]
    state = AdmissionFold("r", "train", SOURCE)
    decided = [d for e in log for d in state.fold(e)]
    (batch,) = [d for d in decided if isinstance(d, ReadyBatch)]
    assert [r.value for r in batch.groups[0].members[0].rewards] == [1.0]
    assert not [d for d in decided if isinstance(d, Late)]


def test_candidates_from_before_the_first_policy_outlive_a_crash_behind_its_first_batch() -> None:
    """The first batch must not mark the second candidate, which is still pending, as decided."""
    closed = [
        replace(made, trajectory_id=t, group_id=t) for t in "ab" for made in _rewarded_candidates()
    ]
    log = [
        *(InputRecord(i, c, PLACE) for i, c in enumerate(closed)),
        InputRecord(2, AdmissionPolicy(run_id="r", batch_groups=1, **POLICY)),
    ]
    state = AdmissionFold("r", "train", SOURCE)
    decided = [d for e in log for d in state.fold(e) if not isinstance(d, Invalid)]
    for kept in range(len(decided) + 1):
        journal = decided[:kept]
        state = AdmissionFold(
            "r", "train", SOURCE, resume_from_journal(journal, SOURCE.topic_id, 0)
        )
        journal += [d for e in log for d in state.fold(e) if not isinstance(d, Invalid)]
        assert groups_of(journal) == {("a", 0): {"a"}, ("b", 0): {"b"}}


def _rewarded_candidates() -> list[Candidate]:
    """Return one candidate with its reward."""
    rig = plainly(([(1, step("a", 0)), (2, session("a", "completed"))], [(3, reward("a", 0.0))]))
    return rig.sent[-1:]

"""Admission after a crash: with a truncated journal it resumes and makes the same decisions."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    CandidateStep,
    Late,
    Place,
    PolicyApplied,
    ReadyBatch,
    Refused,
    RewardValue,
    RunEnded,
    Tick,
)
from clawstream.stream_jobs.admit.decisions.checkpoint import (
    JournalPosition,
    UnusableCheckpoint,
    deserialize,
    serialize,
)
from clawstream.stream_jobs.admit.decisions.journal import (
    CandidateLog,
    Decision,
    InputRecord,
    Invalid,
    JournalRecord,
)
from clawstream.stream_jobs.admit.decisions.state import DecisionState, resume_from_journal
from clawstream.stream_jobs.admit.fold import AdmissionFold

SOURCE = CandidateLog("topic-1", 0, 2)
SEED = st.integers(0, 2**32)
LENGTH = st.integers(5, 120)
CODEC = Codec()
POSITION = JournalPosition.of("journal-1", 7, b"its last record")


def policy(version: int = 1, **changes: Any) -> AdmissionPolicy:
    plain: dict[str, Any] = {
        "run_id": "r",
        "policy_version": version,
        "group_size": 3,
        "min_members": 1,
        "required_rewards": ("rule",),
        "reward_weights": {},
        "reward_deadline_ms": 15,
        "group_deadline_ms": 40,
        "max_staleness": 2,
        "drop_zero_variance": False,
        "min_trainable_tokens": 1,
        "train_outcomes": ("completed",),
        "batch_groups": 2,
        "sync_every": 2,
        "val_groups": 2,
        "val_deadline_ms": 20,
        "algorithm": "grpo",
        "created_at": 0,
    }
    return AdmissionPolicy(**{**plain, **changes})


def ops_of(rng: random.Random, length: int) -> list[Any]:
    """Draw the operations of a log, in order.

    A seed draws the whole list at once: crashes matter in the middle of long, busy logs.
    """
    every: dict[str, Any] = {
        "close": lambda: (
            rng.randrange(3),  # group
            rng.choice([None, None, None, None, 0, 1]),  # round
            rng.choice([None, 0.0, 1.0, 1.0]),  # reward; None: no reward yet
            rng.randint(-3, 1),  # sync index, relative to the version in training
            rng.choice([0, 10, 90]),  # milliseconds between opening and closing
            rng.choice([None, None, 0.2, 0.8]),  # quality; None: not assessed yet
        ),
        "revise": lambda: (
            rng.randrange(1, 12),
            rng.choice([None, 0.0, 1.0, 1.0]),
            rng.choice([None, 0.2, 0.8, 0.8]),
        ),
        "again": lambda: (rng.randrange(1, 30),),
        "tick": lambda: (rng.choice([(0, 1), (0, 1), (0,), (1,)]), rng.choice([0, 0, 10, 40])),
        "policy": lambda: (
            {
                "group_size": rng.randint(1, 4),
                "batch_groups": rng.randint(1, 4),
                "batch_tokens": rng.choice([None, None, 12]),
                "max_staleness": rng.choice([None, 0, 2]),
                "group_deadline_ms": rng.choice([5, 40, 40]),
                "drop_zero_variance": rng.choice([False, False, True]),
                "sync_every": rng.choice([2, 2, 2, 3]),
                "min_quality": rng.choice([None, None, 0.5]),
                "min_step_quality": rng.choice([None, None, 0.5]),
                "require_assessment": rng.choice([False, False, True]),
            },
        ),
    }
    kinds = rng.choices(list(every), weights=[12, 8, 1, 6, 1], k=length)
    return [(kind, *every[kind]()) for kind in kinds]


def log_of(ops: list[Any], channel: Any, ended: bool) -> list[InputRecord]:
    """Return the candidates topic of these operations; each record advances the time."""
    out: list[InputRecord] = []
    seen: list[Candidate] = []
    version, now = 1, 100

    def put(event: Any) -> None:
        out.append(
            InputRecord(
                3 * len(out),
                event,
                Place(topic_id="t", partition=0, first_offset=len(out), last_offset=len(out)),
            )
        )

    put(policy())
    for op in [*ops, *([("end",)] if ended else [])]:
        now += 3
        match op:
            case ("close", group, number, value, sync, open_for, quality):
                tid = f"t{len(seen)}"
                rewards = () if value is None else (rewarded(value),)
                oldest = max(0, len(seen) // 8 + sync)
                seen.append(
                    Candidate(
                        run_id="r",
                        channel=channel,
                        trajectory_key=tid,
                        trajectory_id=tid,
                        group_id=f"g{group}",
                        round=number,
                        revision=0,
                        outcome="completed",
                        opened_at=now - open_for,
                        closed_at=now,
                        rewards=rewards,
                        steps=steps_of(tid, oldest, quality),
                        prompt_tokens=1,
                        trainable_tokens=5,
                        oldest_sync_index=oldest,
                        trainable=True,
                        quality=quality,
                        assessment_revision=None if quality is None else 1,
                    )
                )
                put(seen[-1])
            case ("revise", which, value, quality) if seen:
                old = seen[-which % len(seen)]
                rewards = () if value is None else (rewarded(value),)
                seen[-which % len(seen)] = dataclasses.replace(
                    old, revision=old.revision + 1, rewards=rewards, quality=quality,
                    steps=steps_of(old.trajectory_id, old.oldest_sync_index, quality),
                    assessment_revision=None if quality is None else 1,
                )  # fmt: skip
                put(seen[-which % len(seen)])
            case ("again", which) if seen:
                put(
                    dataclasses.replace(
                        seen[-which % len(seen)],
                        revision=0,
                        opened_at=now + 1000,
                        closed_at=now + 1001,
                    )
                )
            case ("tick", partitions, jump):
                now += jump
                for partition in partitions:
                    put(Tick(partition=partition, event_time=now - partition))
            case ("policy", changes):
                version += 1
                put(policy(version, **changes))
            case ("end",):
                put(RunEnded(run_id="r", created_at=0))
    return out


def steps_of(tid: str, oldest: int | None, quality: float | None) -> tuple[CandidateStep, ...]:
    """Return one step of the trajectory's quality and one step of quality 1."""
    return tuple(
        CandidateStep(
            step_id=f"{tid}~{i}",
            index=i,
            response_tokens=n,
            trainable=True,
            quality=q,
            oldest_sync_index=oldest,
        )
        for i, (n, q) in enumerate(((2, quality), (3, 1.0)))
    )


def rewarded(value: float) -> RewardValue:
    return RewardValue(
        source="rule", name="x", function_version="1", value=value, reward_revision=0
    )


def run(state: AdmissionFold, log: list[InputRecord]) -> list[list[JournalRecord]]:
    """Return the journal records that each input record causes, without dead letters."""
    return [journal_records(state.fold(e)) for e in log]


def journal_records(decisions: list[Decision]) -> list[JournalRecord]:
    return [d for d in decisions if not isinstance(d, Invalid)]


def check(journal: list[JournalRecord]) -> None:
    """Assert the invariants of any journal."""
    batches = [d for d in journal if isinstance(d, ReadyBatch)]
    assert [b.batch_seq for b in batches] == list(range(len(batches)))
    admitted = [m.trajectory_id for b in batches for g in b.groups for m in g.members]
    refused = [
        t
        for d in journal
        if isinstance(d, Refused) and d.reason != "duplicate"
        for t in d.trajectory_ids
    ]
    assert max(Counter(admitted + refused).values(), default=1) == 1, "a trajectory is decided once"
    rounds = [(g.group_id, g.round) for b in batches for g in b.groups]
    rounds += [
        (d.group_id, d.round)
        for d in journal
        if isinstance(d, Refused) and d.whole_group and d.round is not None
    ]
    assert max(Counter(rounds).values(), default=1) == 1, "a round is closed once"
    starts = [d.input_from for d in journal if isinstance(d, ReadyBatch | Refused)]
    assert starts == sorted(starts)
    ends = [d.from_offset + 1 if isinstance(d, PolicyApplied) else d.input_to for d in journal]
    assert ends == sorted(ends)
    limit: int | None = None
    for d in journal:
        if isinstance(d, PolicyApplied):
            limit = d.policy.max_staleness
        elif isinstance(d, ReadyBatch) and d.channel == "train" and limit is not None:
            oldest = min(m.oldest_sync_index or 0 for g in d.groups for m in g.members)
            assert d.batch_seq // d.sync_every - oldest <= limit
        if isinstance(d, ReadyBatch) and d.channel == "val":
            assert len({min(m.oldest_sync_index or 0 for m in g.members) for g in d.groups}) == 1


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(seed=SEED, length=LENGTH, channel=st.sampled_from(["train", "val"]), ended=st.booleans())
def test_crash_after_any_step_changes_nothing(
    seed: int, length: int, channel: Any, ended: bool
) -> None:
    """The decisions of one input record are one transaction.

    With a journal that ends after any transaction, admission makes exactly the same further
    decisions.
    """
    log = log_of(ops_of(random.Random(seed), length), channel, ended)
    steps = run(AdmissionFold("r", channel, SOURCE), log)
    whole = [d for step in steps for d in step]
    check(whole)
    done: list[JournalRecord] = []
    for at, step in enumerate(steps):
        done += step
        if not step:
            continue  # the journal, and so the resumed state, is unchanged
        state = AdmissionFold("r", channel, SOURCE, resume_from_journal(done, SOURCE.topic_id, 0))
        assert journal_records(state.initial_records()) == []
        resumed = [d for step in run(state, log) for d in step]
        assert resumed == [d for step in steps[at + 1 :] for d in step]


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(seed=SEED, length=LENGTH, ended=st.booleans())
def test_cut_at_any_decision_decides_each_trajectory_once(
    seed: int, length: int, ended: bool
) -> None:
    """Admission crashes repeatedly; the journal may end inside a transaction.

    Kafka prevents a partial transaction; the test does not rely on that.
    """
    rng = random.Random(seed)
    log = log_of(ops_of(rng, length), "train", ended)
    journal: list[JournalRecord] = []
    for _ in range(3):
        state = AdmissionFold(
            "r", "train", SOURCE, resume_from_journal(journal, SOURCE.topic_id, 0)
        )
        more = [d for step in run(state, log) for d in step]
        journal += more[: rng.randint(0, len(more))]  # the records written before the crash
    state = AdmissionFold("r", "train", SOURCE, resume_from_journal(journal, SOURCE.topic_id, 0))
    journal += [d for step in run(state, log) for d in step]
    check(journal)
    if ended:
        closed = {e.event.trajectory_id for e in log if isinstance(e.event, Candidate)}
        decided = {
            m.trajectory_id
            for b in journal
            if isinstance(b, ReadyBatch)
            for g in b.groups
            for m in g.members
        }
        decided |= {t for d in journal if isinstance(d, Refused) for t in d.trajectory_ids}
        assert decided == closed, "none is lost"


def kept(state: DecisionState) -> bytes:
    """Return the checkpoint of a state.

    Equal states have equal bytes, because they applied their records in the same order.
    """
    return b"".join(serialize(state, POSITION, CODEC))


@settings(max_examples=examples(25), deadline=None)
@given(seed=SEED, length=LENGTH, channel=st.sampled_from(["train", "val"]), ended=st.booleans())
def test_checkpoint_and_the_rest_are_the_whole_journal(
    seed: int, length: int, channel: Any, ended: bool
) -> None:
    """Admission is killed after any journal record, with a checkpoint of any earlier moment.

    The resume point and the decisions after it equal those of the whole journal.
    """
    rng = random.Random(seed)
    log = log_of(ops_of(rng, length), channel, ended)
    live = AdmissionFold("r", channel, SOURCE)
    stop = rng.randint(0, len(log))
    journal = [d for step in run(live, log[:stop]) for d in step]
    early, cut = DecisionState(), rng.randint(0, len(journal))
    resume_from_journal(journal[:cut], SOURCE.topic_id, 0, early)
    state, position = deserialize(kept(early), CODEC)
    assert position == POSITION
    resume_point, whole = (
        resume_from_journal(journal[cut:], SOURCE.topic_id, 0, state),
        resume_from_journal(journal, SOURCE.topic_id, 0),
    )
    assert kept(resume_point.state) == kept(whole.state) == kept(live.state), (
        "and what wrote it goes on with no other"
    )
    assert dataclasses.replace(resume_point, state=whole.state) == whole
    resumed = run(AdmissionFold("r", channel, SOURCE, resume_point), log)
    assert resumed == run(AdmissionFold("r", channel, SOURCE, whole), log)


def test_checkpoint_that_is_damaged_or_of_another_release_is_refused() -> None:
    log = log_of(ops_of(random.Random(3), 120), "train", False)
    live = AdmissionFold("r", "train", SOURCE)
    run(live, log)
    assert live.state.decided_count > 10
    whole = kept(live.state)
    assert kept(deserialize(whole, CODEC)[0]) == whole
    rng = random.Random(0)
    for at in [0, 18, 25, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(20))]:
        with pytest.raises(UnusableCheckpoint):
            deserialize(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], CODEC)
    for cut in (b"", whole[:10], whole[:-1], whole[: len(whole) // 2]):
        with pytest.raises(UnusableCheckpoint):
            deserialize(cut, CODEC)


@settings(max_examples=examples(100), deadline=None)
@given(seed=SEED, length=LENGTH)
def test_any_order_of_arrival_trains_each_group_at_most_once(seed: int, length: int) -> None:
    rng = random.Random(seed)
    first, *rest = log_of(ops_of(rng, length), "train", False)
    rng.shuffle(rest)
    log = [first, *(dataclasses.replace(e, offset=3 * i + 3) for i, e in enumerate(rest))]
    check([d for step in run(AdmissionFold("r", "train", SOURCE), log) for d in step])


def test_event_time_is_that_of_the_ticks_before_the_start() -> None:
    """A resumed reader reads the last tick of every source partition again.

    Without these ticks, admission would miss a deadline.
    """
    ready = [("close", 0, None, float(i % 2), 0, 0, None) for i in range(6)]
    log = log_of([*ready, ("tick", (0, 1), 1000)], "train", False)
    old = log[1].event
    assert isinstance(old, Candidate)
    late = dataclasses.replace(old, trajectory_id="late", group_id="h", group_size=1, rewards=())
    steps = run(AdmissionFold("r", "train", SOURCE), [*log, InputRecord(99, late, log[1].place)])
    whole = [d for step in steps for d in step]
    last = whole[-1]
    assert isinstance(last, Refused) and (last.reason, last.trajectory_ids) == (
        "reward_missing",
        ("late",),
    )
    resume_point = resume_from_journal(whole[:-1], SOURCE.topic_id, 0)
    assert resume_point.resume_from > log[0].offset
    assert run(
        AdmissionFold("r", "train", SOURCE, resume_point),
        [*log, InputRecord(99, late, log[1].place)],
    )[-1] == [last]


def test_topic_made_anew_goes_on_with_the_next_batch_from_its_start() -> None:
    log = log_of(
        [("close", g, None, float(i % 2), 0, 0, None) for g in range(3) for i in range(3)],
        "train",
        False,
    )
    before = [d for step in run(AdmissionFold("r", "train", SOURCE), log) for d in step]
    assert [d.batch_seq for d in before if isinstance(d, ReadyBatch)] == [0]
    recreated = CandidateLog("topic-2", 0, 2)
    resume_point = resume_from_journal(before, recreated.topic_id, 7)
    assert (resume_point.renewed, resume_point.resume_from, resume_point.next_seq) == (True, 7, 1)
    state = AdmissionFold("r", "train", recreated, resume_point)
    (initial,) = state.initial_records()
    assert initial == PolicyApplied(
        run_id="r", channel="train", policy=policy(), input_topic_id="topic-2", from_offset=7
    )
    moved = [dataclasses.replace(e, offset=7 + i) for i, e in enumerate(log)]
    after = [d for step in run(state, moved) for d in step]
    assert after == [], (
        "what was trained is not trained again; the third group waits for a second one"
    )
    changed = InputRecord(40, policy(2, batch_groups=1))
    applied, batch = (d for step in run(state, [changed]) for d in step)
    assert (
        isinstance(applied, PolicyApplied)
        and isinstance(batch, ReadyBatch)
        and batch.batch_seq == 1
    )
    again = resume_from_journal(
        [
            *before,
            initial,
            Late(run_id="r", channel="train", trajectory_id="t0", revision=1, input_to=9),
        ],
        "topic-2",
        7,
    )
    assert (again.renewed, again.resume_from, again.replay_until, again.policy) == (
        False,
        7,
        8,
        policy(),
    )
    assert resume_from_journal([], "topic-2", 7).renewed is False

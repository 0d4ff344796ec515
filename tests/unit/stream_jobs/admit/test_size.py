"""A batch is one record: it closes before its groups exceed the maximum record size."""

from __future__ import annotations

import dataclasses

import pytest
from support.admit import SOURCE, cand, entries, fold, groups, policy, reward

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    Candidate,
    CandidateStep,
    Place,
    ReadyBatch,
    Refused,
    RewardValue,
)
from clawstream.schemas.topics import MAX_RECORD_BYTES
from clawstream.stream_jobs.admit.decisions.budget import BudgetFold
from clawstream.stream_jobs.admit.decisions.journal import InputRecord, JournalRecord
from clawstream.stream_jobs.admit.decisions.rounds import Rounds
from clawstream.stream_jobs.admit.decisions.state import resume_from_journal
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.admit.group import Group, Member, Verdict, to_batch_group

SCORES = tuple(
    dataclasses.replace(
        reward(i / 7, name="score"),
        function_version="1" * 64,
        step_id=f"session-0123456789~{i:05d}.0",
    )
    for i in range(400)
)


def with_steps(tid: str, group: str, value: float, n: int | None = None) -> Candidate:
    """Return a usable trajectory with 400 step rewards: 40 KB."""
    plain = cand(tid, group, value, group_size=n)
    return dataclasses.replace(plain, rewards=(*plain.rewards, *SCORES))


def decided(log: list[InputRecord], state: AdmissionFold) -> list[JournalRecord]:
    return [d for e in log for d in state.fold(e) if isinstance(d, JournalRecord)]


def hashes(decisions: list[JournalRecord]) -> list[str]:
    return [d.content_hash for d in decisions if isinstance(d, ReadyBatch)]


@pytest.mark.slow
def test_batch_closes_before_it_is_larger_than_a_record() -> None:
    """A restart after any batch gives the same batches.

    A policy change that moves the end of a batch does not change the order of groups.
    """
    log = entries(
        policy(group_size=8, batch_groups=64),
        *(with_steps(f"{g}-{i}", f"g{g}", float(i)) for g in range(30) for i in range(8)),
        policy(policy_version=2, group_size=8, batch_groups=1),
    )
    decisions = decided(log, AdmissionFold("r", "train", SOURCE))
    batches = [d for d in decisions if isinstance(d, ReadyBatch)]
    early = [b for b in batches if b.policy_version == 1]
    sizes = [len(Codec().encode(b)) for b in early]
    assert (
        len(sizes) == 2 and max(sizes) <= MAX_RECORD_BYTES and min(sizes) > 0.8 * MAX_RECORD_BYTES
    )
    assert [g.group_id for b in batches for g in b.groups] == [f"g{g}" for g in range(30)]
    cut = decisions.index(early[0]) + 1
    state = AdmissionFold(
        "r", "train", SOURCE, resume_from_journal(decisions[:cut], SOURCE.topic_id, 0)
    )
    assert hashes(decided(log, state)) == hashes(decisions[cut:])


def test_size_of_a_member_is_never_less_than_what_it_takes() -> None:
    long, high = "\u00e9" * 200, 2**62
    extreme = dataclasses.replace(
        cand(long, long),
        revision=high,
        trainable_tokens=high,
        oldest_sync_index=high,
        rewards=tuple(
            RewardValue(
                source="rule",
                name=long,
                function_version=f"{i}{long}",
                step_id=long,
                value=1.0,
                reason=long,
                reward_revision=high,
            )
            for i in range(50)
        ),
        steps=tuple(
            CandidateStep(step_id=long, index=i, response_tokens=5, trainable=i == 0)
            for i in range(200)
        ),
    )
    frame = next(
        d for d in fold(policy(), cand("a"), cand("b", value=0.0)) if isinstance(d, ReadyBatch)
    )
    empty = len(Codec().encode(dataclasses.replace(frame, groups=())))
    place = Place(topic_id="t" * 22, partition=2**30, first_offset=high, last_offset=high)
    for c in (extreme, cand("a"), with_steps("a", "g", 1.0)):
        group, member = Group((c.group_id, 2**30), 2**30), Member(c, place, 0)
        whole = dataclasses.replace(frame, groups=(to_batch_group(group, [member]),))
        taken = len(Codec().encode(whole)) - empty
        assert taken <= group.size_with(Verdict((member,), ())) <= 1.1 * taken + 100


def test_group_that_no_record_takes_is_refused_and_stops_nobody() -> None:
    members = [with_steps(f"s{i}", "g", float(i), 256) for i in range(256)]
    plain = [cand("a", "h", 1.0), cand("b", "h", 0.0)]
    refused, batch = fold(policy(), *members, *plain)
    assert isinstance(refused, Refused) and (refused.reason, refused.n) == ("too_large", 256)
    assert refused.detail is not None and refused.detail.startswith(
        "256 members with 102656 rewards are "
    )
    assert groups([batch]) == [[["a", "b"]]]


@pytest.mark.slow
def test_group_that_is_larger_than_a_batch_goes_alone() -> None:
    plain = [cand("a", "h", 1.0), cand("b", "h", 0.0)]
    alone = [with_steps(f"s{i}", "g", float(i), 128) for i in range(128)]
    first, second = groups(fold(policy(batch_groups=3), *plain, *alone))
    assert first == [["a", "b"]] and [len(g) for g in second] == [128]


def test_what_an_open_batch_counts_follows_a_policy_that_trains_other_steps() -> None:
    titled = CandidateStep(
        step_id="x~2.0", index=1, response_tokens=30, trainable=True, tags=("title",)
    )
    first = [
        dataclasses.replace(
            cand(t, "g", float(i)), trainable_tokens=35, steps=(*cand(t).steps, titled)
        )
        for i, t in enumerate("ab")
    ]
    before = policy(batch_groups=9, batch_tokens=80, untrained_tags=("title",))
    after = policy(policy_version=2, batch_groups=9, batch_tokens=80)
    (*_, batch) = fold(before, *first, after, cand("c", "h", 1.0), cand("d", "h", 0.0))
    assert isinstance(batch, ReadyBatch) and batch.trainable_tokens == 80


@pytest.mark.slow
def test_refused_group_of_50_000_is_several_records_that_a_restart_reads_as_one() -> None:
    """Ids have the maximum length: one record of all ids would be 11 MB."""
    n = 50_000
    like = cand("x", "big", 1.0, group_size=n)
    members = [dataclasses.replace(like, trajectory_id=f"{i:05d}" + "x" * 222) for i in range(n)]
    state = AdmissionFold("r", "train", SOURCE)
    log = entries(policy(), *members, *(cand(t, "h", float(i)) for i, t in enumerate("ab")))
    _, *decisions = decided(log, state)
    *refused, batch = decisions
    assert isinstance(batch, ReadyBatch) and len(refused) == 3
    assert max(len(Codec().encode(r)) for r in refused) <= MAX_RECORD_BYTES
    parts = [r for r in refused if isinstance(r, Refused)]
    assert [(r.whole_group, r.n, r.reason, r.round) for r in parts] == [
        (False, 0, "zero_variance", 0),
        (False, 0, "zero_variance", 0),
        (True, n, "zero_variance", 0),
    ]
    assert [t for r in parts for t in r.trajectory_ids] == [c.trajectory_id for c in members]
    resume_point = resume_from_journal(decisions, SOURCE.topic_id, 0)
    assert (
        resume_point.state.rounds.of("big") == Rounds(((0, 1),)) == state.state.rounds.of("big")
    ), "nobody is owed"
    assert resume_point.state.refused_members == {} and len(resume_point.state.decisions) == n + 2
    fold = BudgetFold("r", "train", "journal-1")
    for offset, record in enumerate(decisions):
        fold.apply(offset, record)
    budget = fold.budget()
    assert (budget.groups_refused, budget.replacements) == (1, {"zero_variance": n})
    assert [(r.offset, r.n) for r in budget.refusals] == [(2, n)]

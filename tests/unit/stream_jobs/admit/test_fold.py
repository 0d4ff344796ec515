"""The admission fold: a list of records in, a list of decisions out."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any

import pytest
from support.admit import (
    SOURCE,
    cand,
    entries,
    fold,
    groups,
    policy,
    refusals,
    replay,
    reward,
    tick,
)

from clawstream.schemas.records import (
    CandidateStep,
    Late,
    Place,
    PolicyApplied,
    ReadyBatch,
    Refused,
    RunEnded,
)
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.admit.decisions.journal import CandidateLog, InputRecord, Invalid
from clawstream.stream_jobs.admit.equal_rewards import EqualRewards
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.admit.policy import policy_of


def test_full_group_with_rewards_becomes_a_batch() -> None:
    b, a = cand("b", value=0.0), cand("a", value=1.0)
    (batch,) = fold(policy(), b, a)
    assert isinstance(batch, ReadyBatch)
    assert groups([batch]) == [[["a", "b"]]]
    assert (batch.batch_seq, batch.input_from, batch.input_to, batch.trainable_tokens) == (
        0,
        3,
        3,
        10,
    )
    assert (
        batch.policy_version,
        batch.sync_every,
        batch.input_topic_id,
        batch.input_partition,
    ) == (1, 1, "topic-1", 2)
    (group,) = batch.groups
    assert (group.group_id, group.round, group.n) == ("g", 0, 2)
    assert group.members[0].place == Place(topic_id="t", partition=0, first_offset=2, last_offset=2)
    assert group.members[0].rewards == a.rewards


def test_first_policy_opens_the_run_and_earlier_candidates_count() -> None:
    opened = fold(cand("a", value=1.0), cand("b", value=0.0), policy())
    assert groups(opened) == [[["a", "b"]]]
    state = AdmissionFold("r", "train", SOURCE)
    assert [state.fold(e) for e in entries(cand("a"))] == [[]] and state.input_from == 0
    (applied,) = AdmissionFold("r", "train", SOURCE).fold(InputRecord(4, policy()))
    assert isinstance(applied, PolicyApplied) and (applied.from_offset, applied.policy) == (
        4,
        policy(),
    )


def test_other_runs_and_channels_are_passed_over() -> None:
    mixed = (
        policy(),
        cand("a"),
        cand("b", run_id="x", value=0.0),
        cand("c", channel="val", value=0.0),
    )
    assert fold(*mixed) == []
    assert groups(fold(*mixed, cand("d", value=0.0))) == [[["a", "d"]]]


def test_group_waits_for_rewards_and_takes_the_new_revision() -> None:
    waiting = (policy(), cand("a", rewards=()), cand("b", value=0.0))
    assert fold(*waiting) == []
    late = dataclasses.replace(cand("a", value=1.0), revision=1)
    (batch,) = fold(*waiting, late, cand("a", rewards=()))
    assert isinstance(batch, ReadyBatch)
    assert [(m.trajectory_id, m.revision) for m in batch.groups[0].members] == [("a", 1), ("b", 0)]
    assert batch.groups[0].members[0].place.first_offset == 3


def test_reward_that_does_not_come_drops_its_member() -> None:
    short = policy(group_size=3)
    three = (short, cand("a", rewards=(), closed_at=10), cand("b", value=0.0), cand("c", value=1.0))
    assert fold(*three, tick(1009)) == []
    out = fold(*three, tick(1010))
    assert refusals(out) == [("reward_missing", ("a",), False)] and groups(out) == [[["b", "c"]]]
    at_once = fold(short, cand("a", value=None), cand("b", value=0.0), cand("c", value=1.0))
    assert refusals(at_once) == [("reward_missing", ("a",), False)] and groups(at_once) == [
        [["b", "c"]]
    ]
    assert refusals(fold(policy(), cand("a", value=None), cand("b"))) == [
        ("reward_missing", ("a", "b"), True)
    ]


def test_rewards_are_awaited_from_the_last_closing_even_of_one_that_cannot_train() -> None:
    late = cand("c", closed_at=2000, outcome="abandoned", rewards=())
    three = [policy(group_size=3), *(cand(n, rewards=()) for n in "ab"), tick(1999), late]
    assert fold(*three, tick(2999)) == []
    compared = [cand(n, value=v, revision=1) for n, v in (("a", 0.0), ("b", 1.0))]
    out = fold(*three, *compared)
    assert groups(out) == [[["a", "b"]]] and [r[1] for r in refusals(out)] == [("c",)]
    assert refusals(fold(*three, tick(3000)))[0][:2] == ("reward_missing", ("a", "b", "c"))


def test_event_time_is_the_minimum_over_the_source_partitions() -> None:
    two = CandidateLog("t", 0, 2)
    start = (policy(), cand("a", rewards=()), cand("b", rewards=()))
    assert fold(*start, tick(9000, 0), source=two) == []
    assert fold(*start, tick(9000, 0), tick(100, 1), source=two) == []
    assert refusals(fold(*start, tick(9000, 0), tick(100, 1), tick(1010, 1), source=two)) == [
        ("reward_missing", ("a", "b"), True)
    ]
    (bad,) = fold(policy(), tick(5, 2), source=two)
    assert isinstance(bad, Invalid) and "tick of partition 2 of 2" in bad.detail


def test_group_deadline_admits_short_or_refuses() -> None:
    lone = policy(group_size=4)
    two = (lone, cand("a", value=0.0, closed_at=10), cand("b", closed_at=900))
    assert fold(*two, tick(5009)) == []
    assert groups(fold(*two, tick(5010))) == [[["a", "b"]]]
    (refused,) = fold(*two[:2], tick(5010))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.whole_group, refused.n) == ("incomplete", True, 4)
    assert refused.detail == "1 of 4 usable, 2 needed; 3 never came"
    assert (refused.input_from, refused.event_time) == (3, 5010)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("outcome", {"outcome": "timed_out"}),
        ("untrainable", {"trainable": False}),
        ("untrainable", {"oldest_sync_index": None}),
        ("too_short", {"trainable_tokens": 2}),
        ("too_long", {"prompt_tokens": 96}),
        ("quality", {"quality": 0.4}),
        ("reward_missing", {"value": float("nan")}),
        ("reward_missing", {"value": -sys.float_info.max}),
    ],
)
def test_unusable_member(reason: str, changes: dict[str, Any]) -> None:
    strict = policy(
        group_size=3, min_trainable_tokens=3, max_trajectory_tokens=100, min_quality=0.5
    )
    out = fold(strict, cand("a", value=0.0), cand("b", quality=0.5), cand("c", **changes))
    assert refusals(out) == [(reason, ("c",), False)]
    assert groups(out) == [[["a", "b"]]]
    whole = fold(strict, cand("a", value=0.0), *(cand(t, **changes) for t in "bc"))
    assert refusals(whole) == [(reason, ("a", "b", "c"), True)]


def test_equal_rewards_carry_no_gradient() -> None:
    assert refusals(fold(policy(), cand("a"), cand("b"))) == [("zero_variance", ("a", "b"), True)]
    assert groups(fold(policy(drop_zero_variance=False), cand("a"), cand("b"))) == [[["a", "b"]]]
    weighted = policy(reward_weights={"rule/exact": 0.0})
    assert refusals(fold(weighted, cand("a"), cand("b", value=0.0))) == [
        ("zero_variance", ("a", "b"), True)
    ]
    alone = policy(group_size=1, min_members=1, algorithm="other")
    assert groups(fold(alone, cand("a"))) == [[["a"]]], "a group of one has no variance"
    (refused,) = fold(policy(required_rewards=()), cand("a", rewards=()), cand("b", rewards=()))
    assert isinstance(refused, Refused) and "required_rewards" in (refused.detail or "")


def test_group_of_one_is_refused_when_the_algorithm_compares() -> None:
    """The trainer can neither train nor skip such a batch, whatever set the group size."""
    out = fold(policy(), cand("a", group_size=1), cand("b", "h"), cand("c", "h", value=0.0))
    assert groups(out) == [[["b", "c"]]]
    (refused,) = (d for d in out if isinstance(d, Refused))
    assert (refused.reason, refused.detail) == ("incomplete", "1 of 1 usable, 2 needed")
    short = policy(group_size=3, min_members=1)
    assert refusals(fold(short, cand("a"), tick(5010))) == [("incomplete", ("a",), True)]
    validated = fold(policy(val_groups=1), cand("v", group_size=1, channel="val"), channel="val")
    assert groups(validated) == [[["v"]]]


def test_staleness_is_exact_for_the_batch_that_trains_it() -> None:
    limit = policy(max_staleness=1, sync_every=2)
    pairs = [
        (cand(f"a{i}", f"g{i}", oldest_sync_index=9 - i), cand(f"b{i}", f"g{i}", 0.0))
        for i in range(2)
    ]
    fresh = [
        (
            cand(f"x{i}", f"f{i}", oldest_sync_index=9),
            cand(f"y{i}", f"f{i}", 0.0, oldest_sync_index=9),
        )
        for i in range(4)
    ]
    old = fold(limit, *itertools.chain(*fresh), *pairs[0])
    assert [d.reason for d in old if isinstance(d, Refused)] == ["stale"]
    assert old[-1].detail == ("batch 4 trains version 2, oldest token is of 0, limit 1")  # type: ignore[union-attr]
    assert len(groups(fold(limit, *itertools.chain(*fresh[:3]), *pairs[0]))) == 4, (
        "batch 3 still trains version 1"
    )


def test_staleness_is_judged_again_when_the_batch_closes() -> None:
    """A new revision or policy can make a group stale while its batch is still incomplete."""
    start = (policy(batch_groups=2), cand("a"), cand("b", value=0.0))
    strict = policy(batch_groups=2, policy_version=2, max_staleness=0)
    other = [cand(t, "h", v, oldest_sync_index=0) for t, v in (("c", 0.0), ("d", 1.0))]
    assert groups(fold(*start, strict, *other)) == [[["a", "b"], ["c", "d"]]]
    older = dataclasses.replace(cand("a", oldest_sync_index=-1), revision=1)
    out = fold(*start, strict, older, *other)
    assert refusals(out) == [("stale", ("a", "b"), True)] and groups(out) == []


def test_staleness_is_judged_for_each_of_several_batches_that_close_at_once() -> None:
    pairs = [cand(f"{g}{i}", g, float(i)) for g in "ab" for i in (0, 1)]
    smaller = policy(policy_version=2, max_staleness=0)
    out = fold(policy(batch_groups=3, max_staleness=0), *pairs, smaller)
    assert groups(out) == [[["a0", "a1"]]] and refusals(out) == [("stale", ("b0", "b1"), True)]


def test_batch_closes_at_tokens_and_keeps_the_order_of_readiness() -> None:
    many = policy(batch_groups=9, batch_tokens=20)
    events = [
        cand("a1", "a"),
        cand("b1", "b"),
        cand("b2", "b", 0.0),
        cand("a2", "a", 0.0),
        cand("c1", "c"),
    ]
    assert groups(fold(many, *events)) == [[["b1", "b2"], ["a1", "a2"]]]
    assert groups(fold(many, *events[:3])) == []


def test_revision_before_admission_replaces_and_after_it_is_late() -> None:
    first = (policy(batch_groups=2), cand("a"), cand("b", value=0.0))
    equal = dataclasses.replace(cand("b", value=1.0), revision=1)
    assert refusals(fold(*first, equal)) == [("zero_variance", ("a", "b"), True)]
    after = fold(policy(), *first[1:], equal, equal, cand("b", value=0.0))
    (late,) = after[1:]
    assert late == Late(
        run_id="r", channel="train", trajectory_id="b", revision=1, missed_batch_seq=0, input_to=4
    )
    refused = fold(
        policy(), cand("a"), cand("b"), dataclasses.replace(cand("b", value=0.0), revision=3)
    )
    assert isinstance(refused[-1], Late) and refused[-1].missed_batch_seq is None


def test_trajectory_that_comes_back_after_the_horizon_is_a_duplicate() -> None:
    done = (policy(), cand("a"), cand("b", value=0.0))
    again = cand("a", opened_at=100, closed_at=200)
    out = fold(*done, again, again, dataclasses.replace(again, revision=1))
    assert refusals(out) == [("duplicate", ("a",), False)]
    assert isinstance(out[-1], Late) and out[-1].missed_batch_seq is None


def test_next_trajectory_opens_the_next_round() -> None:
    out = fold(policy(), *(cand(f"t{i}", value=i % 2) for i in range(6)))
    assert [
        [(g.round, len(g.members)) for g in d.groups] for d in out if isinstance(d, ReadyBatch)
    ] == [[(0, 2)], [(1, 2)], [(2, 2)]]


def test_round_that_closed_short_refuses_those_who_were_of_it() -> None:
    lenient = policy(group_size=3, min_members=1, drop_zero_variance=False, algorithm="other")
    start = (lenient, cand("a", closed_at=10), tick(5010))
    late = [cand(f"l{i}", opened_at=20, closed_at=6000) for i in range(3)]
    out = fold(*start, *late, cand("n", opened_at=6000, closed_at=6001))
    assert groups(out) == [[["a"]]]
    assert refusals(out) == [("round_closed", ("l0",), False), ("round_closed", ("l1",), False)]
    assert {d.round for d in out if isinstance(d, Refused)} == {0}
    named = fold(*start, cand("x", round=0), cand("y", round=4))
    assert refusals(named) == [("round_closed", ("x",), False)], (
        "a round of one's own is never another one"
    )


def test_named_round_that_is_full_takes_no_more() -> None:
    waiting = policy(batch_groups=2)
    out = fold(waiting, cand("a", round=7), cand("b", round=7, value=0.0), cand("c", round=7))
    assert refusals(out) == [("round_closed", ("c",), False)]


def test_replaced_trajectory_is_no_member_of_its_group() -> None:
    replaced = cand("a", outcome="replaced", rewards=())
    out = fold(policy(), replaced, cand("b"), replaced, cand("a.2", value=0.0))
    assert refusals(out) == [("replaced", ("a",), False)]
    assert groups(out) == [[["a.2", "b"]]]


def test_policy_acts_from_its_offset_on() -> None:
    strict = policy(
        policy_version=2,
        group_size=1,
        min_members=1,
        batch_groups=1,
        required_rewards=(),
        algorithm="other",
    )
    out = fold(
        policy(batch_groups=2),
        cand("a"),
        cand("b", value=0.0),
        cand("c", "h", rewards=()),
        strict,
        cand("d", "i"),
    )
    applied, one, two = out
    assert isinstance(applied, PolicyApplied) and applied.from_offset == 4
    assert groups([one, two]) == [[["a", "b"]], [["d"]]], "h was opened for two"
    assert isinstance(one, ReadyBatch) and one.policy_version == 2


def test_policy_that_cannot_be_obeyed_is_invalid() -> None:
    for wrong, why in (
        (policy(policy_version=2, sync_every=3), "sync_every is 1 for the whole run, not 3"),
        (policy(batch_groups=5), "versions must rise"),
        (policy(policy_version=2, batch_groups=0), "batch_groups is 0"),
    ):
        (invalid,) = fold(policy(), wrong)
        assert isinstance(invalid, Invalid) and why in invalid.detail and invalid.offset == 1
    assert fold(policy(), policy(created_at=99)) == [], "sent again"


def test_end_of_the_run_admits_the_rest_or_refuses_it() -> None:
    full = (cand("a"), cand("b", value=0.0))
    out = fold(
        policy(batch_groups=9, group_size=2),
        *full,
        cand("c", "h"),
        RunEnded(run_id="r", created_at=0),
        cand("d", "h"),
    )
    assert groups(out) == [[["a", "b"]]]
    assert refusals(out) == [("run_ended", ("c",), True), ("run_ended", ("d",), False)]
    assert out[-1].input_from == 4, "the end itself stays to be read again"  # type: ignore[union-attr]


def test_validation_batches_hold_one_sync_index_and_close_by_time() -> None:
    val = {"channel": "val", "closed_at": 10}
    events = [
        cand(f"{g}{i}", g, 1.0, oldest_sync_index=s, **val)
        for g, s in (("a", 0), ("b", 1), ("c", 0))
        for i in (1, 2)
    ]
    out = fold(policy(), *events, channel="val")
    assert groups(out) == [[["a1", "a2"], ["c1", "c2"]]], (
        "equal rewards and old tokens are fine here"
    )
    assert fold(policy(), *events, tick(3009), channel="val") == out
    assert groups(fold(policy(), *events, tick(3010), channel="val"))[1:] == [[["b1", "b2"]]]


def test_content_hash_knows_no_clock_run_or_place() -> None:
    def digest(*events: Any, source: CandidateLog = SOURCE, run: str = "r") -> str:
        state = AdmissionFold(run, "train", source)
        (batch,) = [d for e in entries(*events) for d in state.fold(e) if isinstance(d, ReadyBatch)]
        return batch.content_hash

    plain = digest(policy(), cand("a"), cand("b", value=0.0))
    assert plain == digest(
        policy(), cand("b", value=0.0), cand("a", closed_at=50), source=CandidateLog("other", 0, 1)
    )
    moved = [
        dataclasses.replace(e, run_id="s") for e in (policy(), cand("a"), cand("b", value=0.0))
    ]
    assert plain == digest(*moved, run="s")
    assert plain != digest(policy(), cand("a"), cand("b", value=0.5))


def test_replay_gives_the_same_batches_in_the_same_order() -> None:
    log = entries(
        policy(batch_groups=2), *(cand(f"t{i}", f"g{i % 7}", i % 3) for i in range(50)), tick(9000)
    )
    state = AdmissionFold("r", "train", SOURCE)
    live = [d.content_hash for e in log for d in state.fold(e) if isinstance(d, ReadyBatch)]
    assert len(live) > 5
    assert (
        replay(log, policy(batch_groups=2), tickers=1)
        == replay(log[1:], policy(batch_groups=2), tickers=1)
        == live
    )


@pytest.mark.slow
def test_straggler_blocks_nobody_and_costs_nothing() -> None:
    """10,000 groups are decided while one group never completes.

    The last candidates need no more function calls than the first candidates.
    """
    state = AdmissionFold("r", "train", SOURCE)
    state.fold(InputRecord(0, policy(batch_groups=10)))
    state.fold(InputRecord(1, cand("straggler", "slow")))
    place = Place(topic_id="t", partition=0, first_offset=0, last_offset=0)
    calls, batches = [0, 0], 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        calls[part] += event in ("call", "c_call")

    for part in (0, 1):
        log = [
            InputRecord(2 + 2 * g + i, cand(f"{g}-{i}", f"g{g}", float(i)), place)
            for g in range(part * 5000, part * 5000 + 5000)
            for i in (0, 1)
        ]
        sys.setprofile(count)
        try:
            batches += sum(isinstance(d, ReadyBatch) for e in log for d in state.fold(e))
        finally:
            sys.setprofile(None)
    assert batches == 1000
    assert state.input_from == 1
    assert calls[1] < 1.02 * calls[0]
    (refused,) = state.fold(InputRecord(99_999, tick(5010)))
    assert isinstance(refused, Refused) and refused.trajectory_ids == ("straggler",)
    assert refused.input_from == 100_000


def test_a_policy_leaves_tagged_steps_out_of_training() -> None:
    titled = CandidateStep(
        step_id="a~2.0", index=1, response_tokens=3, trainable=True, tags=("title", "x")
    )
    a = cand("a", trainable_tokens=8, steps=(*cand("a").steps, titled))
    b = cand(
        "b", value=0.0, trainable_tokens=3, steps=(dataclasses.replace(titled, step_id="b~1.0"),)
    )
    (batch,) = fold(policy(), a, b)
    assert isinstance(batch, ReadyBatch) and batch.trainable_tokens == 11
    (batch,) = fold(
        policy(untrained_tags=("title",), min_members=1, algorithm="sft", drop_zero_variance=False),
        a,
        b,
    )[1:]
    assert isinstance(batch, ReadyBatch)
    (member,) = batch.groups[0].members
    assert (member.untrainable_steps, member.trainable_tokens, batch.trainable_tokens) == (
        ("a~2.0",),
        5,
        5,
    )
    later = policy(policy_version=2, untrained_tags=())
    # The new policy applies to the waiting group.
    decisions = fold(policy(untrained_tags=("title",)), a, later, b)
    assert [d.trainable_tokens for d in decisions if isinstance(d, ReadyBatch)] == [11]


def test_a_group_waits_for_the_rewards_of_the_configured_functions() -> None:
    """The last member's reward arrives after the member has closed.

    Without waiting, admission would decide the group without the reward or refuse it as
    zero_variance.
    """
    jobs = {"reward_functions": {"*": ["exact_match@1"]}}
    settings = Settings.model_validate(
        {"run_id": "r", "jobs": jobs, "admit": {"policy": {"group_size": 2, "batch_groups": 1}}}
    )
    said = (reward(1.0, name="exact_match"),), (reward(0.0, name="exact_match"),)
    log: list[Any] = [policy_of(settings, 1, 0), cand("a", rewards=()), cand("b", rewards=())]
    assert fold(*log) == []
    log += [cand("a", revision=1, rewards=said[0])]
    assert fold(*log) == []
    assert groups(fold(*log, cand("b", revision=1, rewards=said[1]))) == [[["a", "b"]]]


def test_a_run_of_groups_with_equal_rewards_is_noticed_now_and_then() -> None:
    counted, found = EqualRewards(), []

    def decide(number: int, values: tuple[float, float]) -> None:
        for decision in fold(
            policy(), *(cand(f"{number}.{i}", f"g{number}", v) for i, v in enumerate(values))
        ):
            found.append(counted.observe(decision))

    for number in range(20):
        decide(number, (1.0, 1.0))
    assert [(f.in_a_row, f.refused_groups, f.admitted_groups) for f in found if f] == [
        (8, 8, 0),
        (16, 16, 0),
    ]
    assert found[7] is not None and found[7].detail == "rewards of 2 members: all 1"
    decide(20, (0.0, 1.0))
    before = len(found)
    for number in range(21, 29):
        decide(number, (0.0, 0.0))
    assert [(f.in_a_row, f.refused_groups, f.admitted_groups) for f in found[before:] if f] == [
        (8, 28, 1)
    ]


def test_decisions_name_the_trace_contexts_of_their_trajectories() -> None:
    """The content hash of a batch, by which a replay is compared, does not depend on them."""
    traced = cand("a", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    (batch,) = fold(policy(), traced, cand("b", value=0.0))
    (plain,) = fold(policy(), cand("a"), cand("b", value=0.0))
    assert isinstance(batch, ReadyBatch) and isinstance(plain, ReadyBatch)
    members = batch.groups[0].members
    assert [m.traceparent for m in members] == [traced.traceparent, None]
    assert batch.content_hash == plain.content_hash
    (refused,) = fold(policy(), traced, cand("b"))
    (untraced,) = fold(policy(), cand("a"), cand("b"))
    assert isinstance(refused, Refused) and isinstance(untraced, Refused)
    assert refused.traceparents == (traced.traceparent, None) and untraced.traceparents == ()

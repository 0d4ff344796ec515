"""Test which offsets of a topic may be trimmed.

Every bound holds. A live run retains all its records; an ended run retains none.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from confluent_kafka.admin import PartitionMetadata, TopicMetadata
from hypothesis import given
from hypothesis import strategies as st
from support.admit import policy

from clawstream.ops.topics.run_survey import (
    JournalSummary,
    RunSummary,
    journal_of,
    last_trained,
)
from clawstream.ops.topics.trim import (
    Bound,
    TrimRange,
    format_ranges,
    journal_bounds,
    needs,
    rewards_before_steps,
    run_bound,
    trim_range,
)
from clawstream.runtime.kafka import Unavailable
from clawstream.runtime.kafka.leaders import all_led
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Late, PolicyApplied, ReadyBatch, Refused, WeightVersion

CODEC = Codec()
JOURNAL = JournalSummary(
    "a", "train", "claw.ready-batches.a.train", low=0, end=20, seen=60, trained=20
)

EMPTY = JournalSummary("a", "val", "claw.ready-batches.a.val", low=0, end=0)


def bounds(journal: JournalSummary, need: str | None = None, *given_up: str) -> list[int]:
    return [b.at for b in journal_bounds(journal, need, given_up)]


@given(st.integers(0, 50), st.integers(0, 50), st.lists(st.integers(-5, 120)))
def test_the_lowest_bound_counts(low: int, more: int, at: list[int]) -> None:
    found = trim_range("t", 0, (low, low + more), [Bound(b, f"why {b}") for b in at])
    assert low <= found.to <= low + more and found.removes == found.to - low
    assert all(found.to <= max(b, low) for b in at)
    assert bool(found.why) == (found.to < found.end), "what stays has a reason"
    assert found.to == low + more or found.to == max(low, min(at))


@pytest.mark.parametrize(
    ("summary", "journals", "given_up", "why"),
    [
        (RunSummary(0, 3, has_policy=True), [JOURNAL], [], "run a lives"),
        (RunSummary(0, 3, has_policy=True), [replace(JOURNAL, low=5)], ["a"], "run a lives"),
        (RunSummary(0, 3), [], [], "run a has no policy yet (--give-up a)"),
        (RunSummary(0, 3), [], ["a"], None),
        (RunSummary(0, 3, has_policy=True, ended=59), [JOURNAL], [], None),
        (RunSummary(0, 3, ended=59), [], [], None),
        (
            RunSummary(0, 3, has_policy=True, ended=60), [JOURNAL], [],
            "run a has ended at 60, but the admission of a (train) has read to 60",
        ),
        (RunSummary(0, 3, has_policy=True, ended=60), [replace(JOURNAL, low=5)], [], None),
        (RunSummary(0, 3, has_policy=True, ended=60), [JOURNAL], ["a"], None),
        (
            RunSummary(0, 3, has_policy=True, ended=59), [], [],
            "run a has ended at 59, but no decisions of it are seen (--give-up a)",
        ),
        (RunSummary(0, 3, has_policy=True, ended=59), [], ["a"], None),
        (
            RunSummary(0, 3, has_policy=True, ended=59), [EMPTY], [],
            "run a has ended at 59, but the admission of a (val) has read to 0",
        ),
        (
            RunSummary(0, 3, has_policy=True, ended=59), [JOURNAL, EMPTY], [],
            "run a has ended at 59, but the admission of a (val) has read to 0",
        ),
        (RunSummary(0, 3, has_policy=True, ended=59), [JOURNAL, replace(EMPTY, seen=60)], [], None),
        (
            RunSummary(0, 3, has_policy=True, ended=59), [replace(EMPTY, seen=60)], [],
            "run a has ended at 59, but no decisions",
        ),
        (RunSummary(0, 90), [replace(JOURNAL, low=5)], [], None),
        (None, [JOURNAL], [], "nothing on the candidates says that run a has ended (--give-up a)"),
        (None, [replace(JOURNAL, low=5)], [], None),
    ],
)  # fmt: skip
def test_which_run_is_over(
    summary: RunSummary | None, journals: list[JournalSummary], given_up: list[str], why: str | None
) -> None:
    found = needs("a", summary, journals, given_up)
    assert found is None if why is None else found is not None and found.startswith(why)


def test_what_holds_ready_batches() -> None:
    assert bounds(JOURNAL) == [20]
    assert bounds(JOURNAL, "run a lives") == [0]
    untrained = replace(JOURNAL, trained=7, untrained=2)
    assert bounds(untrained) == [7]
    assert bounds(untrained, None, "a") == [] and bounds(untrained, None, "b") == [7]
    assert bounds(replace(JOURNAL, unreadable="it cannot be read")) == [0]


def test_the_newest_checkpoint_holds_the_batches_behind_it() -> None:
    """With save_every above 1, a killed trainer has published more than it can resume from."""
    assert [b.at for b in journal_bounds(JOURNAL, None, (), 12)] == [12, 20]
    assert [b.at for b in journal_bounds(JOURNAL, None, (), 20)] == [20]
    assert [b.at for b in journal_bounds(JOURNAL, None, ("a",), 12)] == []


def test_what_holds_a_run_of_which_nothing_was_trained() -> None:
    """Without a batch, a base version never advances the bound; only giving the run up does."""
    journal = replace(JOURNAL, trained=0)
    (bound,) = journal_bounds(journal, None, ())
    assert bound.at == 0 and "--give-up a" in bound.why
    assert bounds(journal, None, "a") == []
    assert "--give-up" not in next(journal_bounds(JOURNAL, None, ())).why


def test_a_reward_may_come_long_before_its_step() -> None:
    assert rewards_before_steps([7_000_000, 6_000_000], 600.0) == 6_000_000 - 600_000 - 60_000
    assert rewards_before_steps([5], 600.0) == 0, "below that Kafka takes it for another question"


def topic(*leaders: int) -> TopicMetadata:
    made = TopicMetadata()
    for number, leader in enumerate(leaders):
        made.partitions[number] = PartitionMetadata()
        made.partitions[number].leader = leader
    return made


def test_a_topic_without_a_leader_is_not_taken_as_absent() -> None:
    listed = {
        "t.steps": topic(0, 1),
        "t.ready-batches.a.train": topic(2),
        "other.steps": topic(-1),
        "u": topic(),
    }
    assert all_led(listed, "t.") == {"t.steps": 2, "t.ready-batches.a.train": 1}
    for metadata in (topic(-1), topic(0, -1), topic()):
        with pytest.raises(Unavailable, match=r"t\.ready-batches\.a\.train, which"):
            all_led(listed | {"t.ready-batches.a.train": metadata}, "t.")


def test_candidates_go_when_the_journals_have_gone() -> None:
    summary = RunSummary(0, 3, has_policy=True, ended=59)
    gone, held = (
        TrimRange("j", 0, 0, 7, 20, "the trainer stands there"),
        TrimRange("j", 0, 0, 0, 20, "the lake has it up to 0"),
    )
    empty = TrimRange("v", 0, 0, 0, 0)
    assert run_bound("a", summary, None, [gone, empty]) is None
    bound = run_bound("a", summary, None, [empty, held])
    assert bound is not None and bound.at == 3 and "j stays: the lake has it up to 0" in bound.why
    bound = run_bound("a", summary, "run a lives", [gone])
    assert bound == Bound(3, "run a lives, since offset 3")


def batch(seq: int, input_to: int, topic_id: str = "C") -> ReadyBatch:
    return ReadyBatch(
        run_id="a",
        channel="train",
        batch_seq=seq,
        groups=(),
        policy_version=1,
        sync_every=1,
        algorithm="grpo",
        reward_weights={},
        input_topic_id=topic_id,
        input_partition=0,
        input_from=0,
        input_to=input_to,
        content_hash="",
        created_at_event_time=0,
        trainable_tokens=0,
    )


def version(
    number: int,
    last: int | None,
    parent: int | None = None,
    journal: str = "J",
    checkpoint: int | None = None,
) -> WeightVersion:
    return WeightVersion(
        version_id=f"a/{number}.0",
        run_id="a",
        sync_index=number,
        attempt=0,
        format="full",
        files=(),
        channel="train",
        parent_version=None if parent is None else f"a/{parent}.0",
        checkpoint_version=None if checkpoint is None else f"a/{checkpoint}.0",
        batches_topic_id=journal,
        last_batch_seq=last,
        metrics={},
        created_at=0,
    )


def test_how_far_a_version_has_trained() -> None:
    assert last_trained([], None, "J") is None
    assert last_trained([version(0, None)], "a/0.0", "J") is None
    assert last_trained([version(0, None), version(1, 3, 0)], "a/1.0", "J") == 3
    assert (
        last_trained([version(0, None), version(1, 3, 0), version(2, None, 1)], "a/2.0", "J") == 3
    )
    assert last_trained([version(1, 5, 0), version(2, 3, 0)], "a/2.0", "J") == 3, (
        "an older checkpoint was gone on from"
    )
    assert last_trained([version(0, None), version(1, 3, 0, "before")], "a/1.0", "J") is None


def test_what_a_journal_says() -> None:
    bare = replace(JOURNAL, seen=0, trained=0)
    late = Late(
        run_id="a", channel="train", trajectory_id="x", revision=2, missed_batch_seq=0, input_to=900
    )
    refused = Refused(
        run_id="a",
        channel="train",
        group_id="g",
        round=0,
        trajectory_ids=(),
        revisions=(),
        whole_group=True,
        reason="stale",
        n=0,
        input_topic_id="C",
        input_from=0,
        input_to=31,
        event_time=0,
    )
    applied = PolicyApplied(
        run_id="a", channel="train", policy=policy(), input_topic_id="C", from_offset=8
    )
    events = [
        (0, applied),
        (2, batch(0, 10)),
        (4, batch(1, 20)),
        (6, refused),
        (8, batch(2, 900, "old")),
        (10, late),
    ]

    def read(
        versions: list[WeightVersion], committed: int = 0, is_trained: bool = True
    ) -> tuple[int, int, int]:
        j = journal_of(bare, iter(events), "C", committed, versions, "J", is_trained)
        return j.seen, j.trained, j.untrained

    log = [version(0, None), version(1, 0, 0), version(2, 1, 1, checkpoint=1)]
    assert read(log) == (31, 3, 1), "a resume needs batch 1 again"
    assert read([*log, version(3, 2, 2, checkpoint=1)]) == (31, 9, 0), "nothing is left to train"
    assert read(log[:2]) == (31, 0, 2), "no checkpoint is complete"
    assert read([version(0, 2)], committed=77) == (77, 9, 0)
    assert read([]) == (31, 0, 3), "nobody has trained"
    assert read([], is_trained=False) == (31, 20, 0)
    assert journal_of(bare, iter(events[:1]), "C", 0, [], "J", True).trained == 20, (
        "nothing to train"
    )


def test_the_table_has_a_line_for_what_is_there() -> None:
    ranges = [
        TrimRange("claw.x", 0, 0, 7, 9, "run a lives"),
        TrimRange("claw.y", 1, 0, 0, 0),
        TrimRange("claw.y", 2, 3, 3, 8, "why"),
    ]
    assert [line.split(maxsplit=5) for line in format_ranges(ranges).splitlines()] == [
        ["TOPIC", "PARTITION", "START", "GOES", "TO", "END  HELD BY"],
        ["claw.x", "0", "0", "7", "9", "run a lives"],
        ["claw.y", "2", "3", "-", "8", "why"],
    ]

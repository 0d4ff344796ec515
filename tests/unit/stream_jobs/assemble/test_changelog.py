"""Reading the changelog: fenced writers, repeated and missing records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_step
from support.assemble import CODEC

from clawstream.schemas.records import AssemblyDelta, AssemblyMarker, AssemblySnapshot
from clawstream.stream_jobs.assemble import changelog
from clawstream.stream_jobs.assemble.changelog import ChangelogReader
from clawstream.stream_jobs.assemble.state.changes import Opened, StepAdded
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.steps import OpenStep
from clawstream.stream_jobs.errors import UnreadableChangelog


def test_state_log_drops_fenced_writers_and_repeated_deltas() -> None:
    state = PartitionState()
    log = ChangelogReader()

    def delta(epoch: int, seq: int, key: str) -> Any:
        return changelog.delta(epoch, seq, state, [Opened(("r", key), 0, "train", 0)])

    # The marker of this epoch was trimmed.
    log.read(6, CODEC.decode(CODEC.encode(delta(5, 1, "a"))), 1)
    log.read(7, delta(5, 1, "again"), 1)
    log.read(
        8, AssemblyMarker(worker="w", steps_topic_id="s", rewards_topic_id="r", created_at=0), 1
    )
    log.read(9, delta(5, 2, "zombie"), 1)
    log.read(10, delta(8, 2, "b"), 1)
    assert [k[1] for k in log.state.opened] == ["a", "b"]
    with pytest.raises(UnreadableChangelog, match="delta 4 follows 2"):
        log.read(11, delta(8, 4, "d"), 1)
    with pytest.raises(UnreadableChangelog, match="delta 2 follows 0"):
        ChangelogReader().read(2, delta(1, 2, "its beginning is gone"), 1)


def test_state_log_drops_what_a_worker_wrote_that_knew_another_topic_of_that_name() -> None:
    """The topic was recreated under a worker whose epoch belongs to the old topic.

    If its epoch counted as the highest, the reader would ignore all later owners.
    """
    log, state = ChangelogReader(), PartitionState()
    log.read(0, changelog.delta(700, 31, state, [Opened(("r", "old"), 0, "train", 0)]), 1)
    log.read(
        1, AssemblyMarker(worker="w", steps_topic_id="s", rewards_topic_id="r", created_at=0), 1
    )
    log.read(2, changelog.delta(700, 32, state, [Opened(("r", "older"), 0, "train", 0)]), 1)
    log.read(3, changelog.delta(1, 1, state, [Opened(("r", "new"), 0, "train", 0)]), 1)
    assert [k[1] for k in log.state.opened] == ["new"] and log.seq == 1


STEP: list[Any] = [
    1, 5, "01CALL.0", 10, 2, None, 2**62 + 1, "error", "no logprobs", None, None, 3, -7, None, 0
]  # fmt: skip
"""A step with hashes of all sizes; some are null."""


@pytest.mark.parametrize(
    "change",
    [
        ["a change of tomorrow", ["r", "k"]],
        ["o", ["r", "k"], 0, "train", 0, "one more"],
        ["o", ["r", "k"], 0, "train"],
        ["o", ["r", "k"], "soon", "train", 0],
        ["s", 7, [*STEP, *[None] * 6]],
        "no change",
    ],
)
def test_what_a_newer_release_wrote_is_refused_in_plain_words(change: Any) -> None:
    """Changes have no schema: a worker of an older release must not restart on them for ever."""
    delta = changelog.delta(0, 1, PartitionState(), [change])
    with pytest.raises(UnreadableChangelog, match="upgrade all assemble workers"):
        ChangelogReader().read(1, delta, 1)


@pytest.mark.parametrize("hashes", [b"", bytes(8), bytes(30), bytes(32)])
def test_a_delta_whose_hashes_are_not_its_steps_is_refused(hashes: bytes) -> None:
    changes = [Opened(("r", "k"), 5, "train", 1), StepAdded(1, OpenStep(*STEP))]
    written = replace(changelog.delta(0, 1, PartitionState(), changes), hashes=hashes)
    with pytest.raises(UnreadableChangelog, match="can't apply"):
        ChangelogReader().read(1, written, 1)


def test_steps_come_back_with_hashes_of_all_sizes() -> None:
    first = OpenStep(*STEP)
    second = replace_step(
        first, step_suffix="01NEXT.0", last_turn_hash=9, messages_hash=-(2**62), call_id_hash=11
    )
    changes = [Opened(("r", "k"), 5, "train", 1), StepAdded(1, first), StepAdded(1, second)]
    written = changelog.delta(0, 1, PartitionState(), changes)
    assert len(written.hashes) == 8 * (3 + 6)
    log = ChangelogReader()
    log.read(1, CODEC.decode(CODEC.encode(written)), 1)
    assert list(log.state.opened["r", "k"].steps) == [first, second]


@pytest.mark.parametrize(("format", "release"), [(changelog.FORMAT + 1, "newer"), (0, "older")])
def test_a_log_of_another_format_is_refused_with_the_release_that_reads_it(
    format: int, release: str
) -> None:
    state = PartitionState()
    pieces: list[AssemblyDelta | AssemblySnapshot] = [
        changelog.delta(0, 1, state, []),
        *changelog.snapshot(0, 1, state),
    ]
    for piece in pieces:
        with pytest.raises(UnreadableChangelog, match=f"{release} release"):
            ChangelogReader().read(1, replace(piece, format=format), 1)

"""Admission's checkpoint: written rarely and atomically, and used only with its own journal.

It is optional: admission can always read the whole journal instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Refused
from clawstream.stream_jobs.admit.decisions.checkpoint import (
    SAVE_AT_CLOSE,
    SAVE_EVERY,
    CheckpointFile,
    JournalPosition,
)
from clawstream.stream_jobs.admit.decisions.state import DecisionState

CODEC = Codec()
POSITION = JournalPosition.of("journal-1", 7, b"its last record")


def decided(many: int, state: DecisionState | None = None) -> DecisionState:
    """Return the state with this many more decided trajectories."""
    state = DecisionState() if state is None else state
    first = state.decided_count
    ids = tuple(f"t{i}" for i in range(first, first + many))
    state.apply(
        Refused(
            run_id="r",
            channel="train",
            group_id="g",
            trajectory_ids=ids,
            revisions=(0,) * many,
            whole_group=False,
            reason="run_ended",
            n=0,
            input_topic_id="topic-1",
            input_from=1,
            input_to=2,
            event_time=3,
        )
    )
    return state


def file_at(path: Path) -> CheckpointFile:
    return CheckpointFile(path, CODEC, structlog.get_logger())


def said(logs: Any) -> list[str]:
    return [entry["event"] for entry in logs]


@pytest.mark.slow
def test_written_when_enough_is_decided_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "admit" / "x.checkpoint"
    file, state = file_at(path), decided(SAVE_EVERY - 1)
    file.save_if_due(state, POSITION)
    file.close(DecisionState(), POSITION)
    assert not path.exists(), "neither enough nor worth it"
    file.save_if_due(decided(1, state), POSITION)
    decided(SAVE_AT_CLOSE - 1, state)
    file.close(state, POSITION)
    found = file_at(path).load("journal-1", 8)
    assert found is not None and found[0].decided_count == SAVE_EVERY and found[1] == POSITION
    again = file_at(path)
    assert again.load("journal-1", 8) is not None
    again.close(decided(1, state), JournalPosition.of("journal-1", 9, b"later"))
    found = file_at(path).load("journal-1", 10)
    assert (
        found is not None
        and found[0].decided_count == SAVE_EVERY + SAVE_AT_CLOSE
        and found[1].offset == 9
    )


@pytest.mark.parametrize(
    ("journal", "end", "why"),
    [
        (
            "journal-2",
            8,
            "it is of the journal journal-1 to offset 7; this is journal-2 and ends at 8",
        ),
        (
            "journal-1",
            7,
            "it is of the journal journal-1 to offset 7; this is journal-1 and ends at 7",
        ),
    ],
)
def test_of_another_journal_or_of_a_longer_one_it_is_not_used(
    tmp_path: Path, journal: str, end: int, why: str
) -> None:
    path = tmp_path / "x.checkpoint"
    file_at(path).close(decided(SAVE_AT_CLOSE), POSITION)
    with structlog.testing.capture_logs() as logs:
        assert file_at(path).load(journal, end) is None
    assert [(e["event"], e["why"]) for e in logs] == [("checkpoint_not_used", why)]


def test_what_is_no_checkpoint_is_not_used_and_drafts_of_the_killed_go(tmp_path: Path) -> None:
    path, draft = tmp_path / "x.checkpoint", tmp_path / ".x.checkpoint.99.abcd"
    path.write_bytes(b"something else")
    draft.write_bytes(b"half of one")
    with structlog.testing.capture_logs() as logs:
        assert file_at(path).load("journal-1", 8) is None
    assert said(logs) == ["checkpoint_not_used"] and not draft.exists()
    with structlog.testing.capture_logs() as logs:
        assert file_at(tmp_path / "none.checkpoint").load("journal-1", 8) is None
    assert said(logs) == [], "a first start"


def test_where_nothing_can_be_written_admission_goes_on(tmp_path: Path) -> None:
    (tmp_path / "admit").write_bytes(b"a file where the directory should be")
    with structlog.testing.capture_logs() as logs:
        file = file_at(tmp_path / "admit" / "x.checkpoint")
        assert file.load("journal-1", 8) is None
        file.close(decided(SAVE_AT_CLOSE), POSITION)
    assert said(logs) == ["checkpoint_not_used", "checkpoint_not_written"]

"""The file that spares admission its journal: written seldom and whole, used only where it belongs, never needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from schemas.codec.single_object import Codec
from schemas.records import Refused
from stream_jobs.admit.decisions.checkpoint import EVERY, WORTH_IT, CheckpointFile, Mark
from stream_jobs.admit.decisions.state import Ledger

CODEC = Codec()
MARK = Mark.of("journal-1", 7, b"its last record")


def told(many: int, ledger: Ledger | None = None) -> Ledger:
    """A ledger of that many trajectories more."""
    ledger = Ledger() if ledger is None else ledger
    first = ledger.told
    ids = tuple(f"t{i}" for i in range(first, first + many))
    ledger.take(
        Refused(
            run_id="r", channel="train", group_id="g", trajectory_ids=ids, revisions=(0,) * many, whole_group=False,
            reason="run_ended", n=0, input_topic_id="topic-1", input_from=1, input_to=2, event_time=3,
        )
    )  # fmt: skip
    return ledger


def file_at(path: Path) -> CheckpointFile:
    return CheckpointFile(path, CODEC, structlog.get_logger())


def said(logs: Any) -> list[str]:
    return [entry["event"] for entry in logs]


def test_written_when_enough_is_decided_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "admit" / "x.ledger"
    file, ledger = file_at(path), told(EVERY - 1)
    file.keep(ledger, MARK)
    file.close(Ledger(), MARK)
    assert not path.exists(), "neither enough nor worth it"
    file.keep(told(1, ledger), MARK)
    told(WORTH_IT - 1, ledger)
    file.close(ledger, MARK)
    found = file_at(path).load("journal-1", 8)
    assert found is not None and found[0].told == EVERY and found[1] == MARK
    again = file_at(path)
    assert again.load("journal-1", 8) is not None
    again.close(told(1, ledger), Mark.of("journal-1", 9, b"later"))
    found = file_at(path).load("journal-1", 10)
    assert found is not None and found[0].told == EVERY + WORTH_IT and found[1].offset == 9


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
    path = tmp_path / "x.ledger"
    file_at(path).close(told(WORTH_IT), MARK)
    with structlog.testing.capture_logs() as logs:
        assert file_at(path).load(journal, end) is None
    assert [(e["event"], e["why"]) for e in logs] == [("checkpoint_not_used", why)]


def test_what_is_no_checkpoint_is_not_used_and_drafts_of_the_killed_go(tmp_path: Path) -> None:
    path, draft = tmp_path / "x.ledger", tmp_path / ".x.ledger.99.abcd"
    path.write_bytes(b"something else")
    draft.write_bytes(b"half of one")
    with structlog.testing.capture_logs() as logs:
        assert file_at(path).load("journal-1", 8) is None
    assert said(logs) == ["checkpoint_not_used"] and not draft.exists()
    with structlog.testing.capture_logs() as logs:
        assert file_at(tmp_path / "none.ledger").load("journal-1", 8) is None
    assert said(logs) == [], "a first start"


def test_where_nothing_can_be_written_admission_goes_on(tmp_path: Path) -> None:
    (tmp_path / "admit").write_bytes(b"a file where the directory should be")
    with structlog.testing.capture_logs() as logs:
        file = file_at(tmp_path / "admit" / "x.ledger")
        assert file.load("journal-1", 8) is None
        file.close(told(WORTH_IT), MARK)
    assert said(logs) == ["checkpoint_not_used", "checkpoint_not_written"]

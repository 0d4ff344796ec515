"""Test how a reader handles client errors that do not stop it."""

from __future__ import annotations

from confluent_kafka import KafkaError as Code
from structlog.testing import capture_logs

from clawstream.runtime.kafka.reader import (
    DOUBT_S,
    REPEAT_LOG_S,
    SILENT_S,
    AsyncCommits,
    ErrorLogThrottle,
    Silence,
)


def test_an_error_that_lasts_is_logged_now_and_then_and_another_one_at_once() -> None:
    denied, gone = Code(Code.TOPIC_AUTHORIZATION_FAILED), Code(Code.UNKNOWN_TOPIC_OR_PART)
    errors = ErrorLogThrottle()
    with capture_logs() as logs:
        for at in range(100):
            errors.log(denied, 5.0 + 0.1 * at)
        errors.log(gone, 15.0)
        errors.log(denied, 5.0 + REPEAT_LOG_S)
    assert [line["error"] for line in logs] == [str(denied), str(gone), str(denied)]
    assert {(line["event"], line["log_level"]) for line in logs} == {
        ("kafka_not_readable", "warning")
    }


def test_a_commit_that_lands_behind_a_newer_one_is_due_again() -> None:
    """The client retries a commit by itself while the coordinator is unavailable."""
    commits = AsyncCommits()
    assert commits.due({("t", 0): 0, ("t", 1): 5}) == {("t", 0): 0, ("t", 1): 5}
    assert commits.due({("t", 0): 23}) == {("t", 0): 23, ("t", 1): 5}
    commits.landed(("t", 0), 23)
    assert commits.due({}) == {("t", 1): 5}
    commits.landed(("t", 0), 0)
    commits.landed(("t", 1), 5)
    assert commits.due({}) == {("t", 0): 23}
    commits.landed(("t", 0), 23)
    assert commits.due({}) == {}


def test_commits_begin_again_with_the_newest_of_all_partitions() -> None:
    commits = AsyncCommits()
    commits.due({("t", 0): 5, ("t", 1): 7})
    commits.landed(("t", 0), 5)
    again = commits.again()
    assert again.due({}) == {("t", 0): 5, ("t", 1): 7}
    commits.landed(("t", 1), 7)  # by the client that was given up
    assert again.due({}) == {("t", 0): 5, ("t", 1): 7}


def test_a_reader_has_stopped_if_records_wait_twice_in_silence() -> None:
    silence = Silence(0.0)
    assert not silence.asks(SILENT_S - 1) and silence.asks(SILENT_S)
    assert not silence.stopped(SILENT_S, waiting=True)
    assert not silence.asks(SILENT_S + DOUBT_S - 1)
    assert silence.stopped(SILENT_S + DOUBT_S, waiting=True)
    # It gets as much time again.
    assert not silence.asks(2 * SILENT_S)
    assert not silence.stopped(2 * SILENT_S + DOUBT_S, waiting=True)


def test_a_reader_with_nothing_to_read_or_that_reads_has_not_stopped() -> None:
    silence = Silence(0.0)
    assert not silence.stopped(60.0, waiting=True)
    assert not silence.stopped(65.0, waiting=False)
    assert not silence.stopped(125.0, waiting=True)
    silence.broken(126.0)
    assert not silence.asks(185.0)
    assert not silence.stopped(186.0, waiting=True)

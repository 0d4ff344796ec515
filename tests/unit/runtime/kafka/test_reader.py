"""Test how a reader handles client errors that do not stop it."""

from __future__ import annotations

from confluent_kafka import KafkaError as Code
from structlog.testing import capture_logs

from runtime.kafka.reader import REPEAT_LOG_S, AsyncCommits, ErrorLogThrottle


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

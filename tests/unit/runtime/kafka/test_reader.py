"""What a reader does with errors of the client that end nothing."""

from __future__ import annotations

from confluent_kafka import KafkaError as Code
from structlog.testing import capture_logs

from runtime.kafka.reader import SAY_EVERY_S, Advice, Complaints


def test_an_error_that_lasts_is_logged_now_and_then_and_another_one_at_once() -> None:
    denied, gone = Code(Code.TOPIC_AUTHORIZATION_FAILED), Code(Code.UNKNOWN_TOPIC_OR_PART)
    complaints = Complaints()
    with capture_logs() as logs:
        for at in range(100):
            complaints.hear(denied, 5.0 + 0.1 * at)
        complaints.hear(gone, 15.0)
        complaints.hear(denied, 5.0 + SAY_EVERY_S)
    assert [line["error"] for line in logs] == [str(denied), str(gone), str(denied)]
    assert {(line["event"], line["log_level"]) for line in logs} == {
        ("kafka_not_readable", "warning")
    }


def test_a_commit_that_lands_behind_a_newer_one_is_due_again() -> None:
    """The client repeats a commit by itself while the coordinator is not there yet."""
    advice = Advice()
    assert advice.due({("t", 0): 0, ("t", 1): 5}) == {("t", 0): 0, ("t", 1): 5}
    assert advice.due({("t", 0): 23}) == {("t", 0): 23, ("t", 1): 5}
    advice.landed(("t", 0), 23)
    assert advice.due({}) == {("t", 1): 5}
    advice.landed(("t", 0), 0)
    advice.landed(("t", 1), 5)
    assert advice.due({}) == {("t", 0): 23}
    advice.landed(("t", 0), 23)
    assert advice.due({}) == {}

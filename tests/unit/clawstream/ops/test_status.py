"""Test the output of `clawstream status`."""

from __future__ import annotations

from pathlib import Path

from clawstream.ops.status import Progress, Status, format_status

READY = {
    "state": "running",
    "pid": 7,
    "ready": True,
    "status": "http://h:1",
    "restarts": 0,
    "exit_code": None,
    "error": None,
}
DOWN = {
    "state": "fenced",
    "pid": None,
    "ready": False,
    "status": "",
    "restarts": 2,
    "exit_code": 78,
    "error": "a newer one",
}
DONE = {**DOWN, "state": "done", "exit_code": 0, "error": None, "restarts": 0}


def test_everything_is_ready() -> None:
    progress = Progress(
        "r/3.0", {"w": "ready, r/3.0"}, {"claw-lake": 5, "claw-reward": 0}, 2, 32, {"stale": 3}
    )
    status = Status(Path("d"), "r", 1, {"gateway": READY, "trainer": DONE}, progress)
    assert status.is_up
    assert format_status(status).splitlines() == [
        "d: up (clawstream up, pid 1)",
        "  gateway    ready                http://h:1",
        "  trainer    done",
        "run r",
        "  version    r/3.0",
        "  worker     w: ready, r/3.0",
        "  lag        claw-lake 5",
        "  groups     32 admitted in 2 batches; refused: stale 3",
    ]


def test_a_process_that_stays_down_says_why() -> None:
    status = Status(Path("d"), "r", 1, {"gateway": READY, "admit": DOWN}, None)
    assert not status.is_up
    said = format_status(status)
    assert (
        "d: not all is ready" in said
        and "  admit      fenced               2 restarts; a newer one" in said
    )
    assert said.endswith("  Kafka does not answer")


def test_a_run_in_which_all_rewards_are_equal_says_so() -> None:
    def said(progress: Progress) -> bool:
        return "every group was refused as zero_variance" in format_status(
            Status(Path("d"), "r", None, {}, progress)
        )

    assert said(Progress(refused={"zero_variance": 9}))
    assert not said(Progress(refused={"zero_variance": 9, "stale": 1}))
    assert not said(Progress(admitted=1, batches=1, refused={"zero_variance": 9}))
    assert not said(Progress())


def test_nothing_runs() -> None:
    status = Status(Path("d"), "r", None, {}, Progress())
    assert not status.is_up and format_status(status).startswith("d: nothing runs\n")

"""Test the observation of an installation for the inspector, without a broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawstream.inspection.operations import RETRY_S, Operations, consumers_of, processes_of
from clawstream.ops.health import Observed, problems_of
from clawstream.ops.lag import Backlog
from clawstream.ops.monitoring.rules import Status
from clawstream.ops.spool_drain import Spooled, spooled
from clawstream.runtime.kafka import Unavailable
from clawstream.schemas.settings import Settings


def backlog(role: str, status: Status | None, partition: int = 0, records: int = 3) -> Backlog:
    return Backlog(
        f"claw-{role}", "claw.steps", partition, 5, 0, 8, True, None, records, True, 1000, status
    )


def test_stalled_consumers_come_first_then_the_worst() -> None:
    found = [
        backlog("admit.old.train", None), backlog("assemble", "ok"),
        backlog("assemble", "stalled", 1), backlog("compare", "absent"), backlog("lake", "behind"),
    ]  # fmt: skip
    problems = problems_of(Observed(backlogs=found), Settings(), 11.0)
    shown = consumers_of(found, problems, 11.0)
    assert [(c.group, c.status) for c in shown] == [
        ("claw-assemble", "stalled"), ("claw-compare", "absent"), ("claw-lake", "behind"),
        ("claw-admit.old.train", None),
    ]  # fmt: skip
    assert (shown[0].records, shown[0].waiting_s, shown[0].exact) == (6, 10.0, True)
    assert [c.is_problem for c in shown] == [True, False, False, False]
    row = {"state": "running", "pid": 7, "ready": True, "restarts": 0, "status": "", "error": None}
    down = {**row, "state": "fenced", "ready": False}
    rows = {"assemble": row, "lake": row, "admit": down}
    problems = problems_of(Observed(processes=rows, backlogs=found), Settings(), 11.0)
    processes = processes_of(rows, problems, Settings())
    assert [p.is_problem for p in processes] == [True, False, True]


class NoBroker:
    """A cluster without a broker that counts how often it is asked."""

    asked = 0

    def ask(self, timeout_s: float) -> None:
        self.asked += 1
        raise Unavailable(f"no Kafka answers within {timeout_s:g} s")


def test_an_absent_broker_is_asked_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, clock_s = NoBroker(), [100.0]
    monkeypatch.setattr("clawstream.inspection.operations.time.monotonic", lambda: clock_s[0])
    observe = Operations(Settings(data_dir=tmp_path), cluster)  # type: ignore[arg-type]
    found = [observe() for _ in range(3)]
    assert cluster.asked == 1
    assert {o.kafka_error for o in found} == {"no Kafka answers within 2 s"}
    assert not found[0].consumers and not found[0].workers
    assert (found[0].processes, found[0].weights, found[0].dead_letters) == (None, None, None)
    assert found[0].disk is not None and 0 < found[0].disk.free < found[0].disk.size
    clock_s[0] += RETRY_S
    observe()
    assert cluster.asked == 2
    observe.close()


def test_the_spool_is_measured_by_what_waits(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert spooled(settings) is None
    for place, size in (("a", 10), ("b", 20), ("b/quarantined", 5), ("a/damaged", 1)):
        directory = settings.spool_dir / place
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "1.spool").write_bytes(b"x" * size)
    assert spooled(settings) == Spooled(waiting=30, quarantined=5, damaged=1)

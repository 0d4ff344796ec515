"""Test what counts as a problem, and the remedy of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clawstream.gateway.durability.quarantine import Damage
from clawstream.ops.health import Observed, Problem, exit_code_of, problems_of
from clawstream.ops.lag import Backlog
from clawstream.ops.monitoring.rules import Status
from clawstream.ops.position_check import Diagnosis
from clawstream.runtime.exit_codes import EXIT_FAILED, EXIT_KAFKA
from clawstream.runtime.topics.positions import StoredPosition
from clawstream.schemas.settings import Settings

SETTINGS = Settings()
PID = 7


def row(state: str = "running", **more: Any) -> dict[str, Any]:
    known = {"ready": True, "status": "", "exit_code": None, "error": None, "restarts": 0}
    return {"state": state, "pid": PID, **known, **more}


def backlog(partition: int, status: Status | None, records: int = 3) -> Backlog:
    return Backlog(
        "claw-assemble", "claw.steps", partition, 4, 0, 7, True, None, records, True, 1_000, status
    )


def problems(**observed: Any) -> list[Problem]:
    return problems_of(Observed(**observed), SETTINGS, now_s=11.0)


STALLED = [backlog(0, "stalled"), backlog(1, "ok"), backlog(2, "stopped", 4)]


def test_a_stalled_consumer_is_named_with_its_partitions() -> None:
    (problem,) = problems(backlogs=STALLED)
    assert (problem.kind, problem.subject) == ("consumer", "claw-assemble claw.steps")
    assert problem.what == (
        "stalled: claw-assemble does not read claw.steps (partition 0, 2): 7 records wait, the "
        "oldest for 10 s"
    )
    assert problem.remedy.startswith("start assemble, or look at its log")


@pytest.mark.parametrize(
    ("process", "suspended", "remedy"),
    [
        (row(), {}, f"kill -9 {PID} restarts it"),
        (row(), {"assemble": 8}, "assemble (pid 8) is suspended by a signal: kill -CONT 8"),
        (
            row(ready=False, status="waits: no room to write to /lake"),
            {},
            f"assemble (pid {PID}) is not ready: waits: no room to write to /lake",
        ),
        (row("restarting", error="no space"), {}, "assemble is restarting: no space"),
    ],
)
def test_a_process_explains_its_consumer_and_is_no_second_problem(
    process: dict[str, Any], suspended: dict[str, int], remedy: str
) -> None:
    (problem,) = problems(processes={"assemble": process}, suspended=suspended, backlogs=STALLED)
    assert problem.kind == "consumer" and remedy in problem.remedy


def test_who_has_never_read_is_a_problem_only_where_its_process_runs() -> None:
    never = [backlog(0, "absent")]
    assert problems(backlogs=never) == []
    assert len(problems(backlogs=never, processes={"assemble": row()})) == 1


def test_processes_that_do_not_run_are_named() -> None:
    table = {
        "lake": row(),
        "trainer": row("done", ready=False, exit_code=0),
        "gateway": row("stopped", ready=False, exit_code=-15),
        "admit": row("fenced", ready=False, exit_code=78, error="a newer one"),
        "rollout": row(ready=False, status="loads the model"),
        "assemble": row(),
    }
    named = problems(processes=table, suspended={"assemble": 8, "up": 9})
    assert [(p.kind, p.subject, p.remedy.partition(";")[0]) for p in named] == [
        ("up", "up", "kill -CONT 9"),
        ("process", "admit", "admit is fenced: a newer one"),
        ("not_ready", "rollout", f"rollout (pid {PID}) is not ready: loads the model"),
        ("process", "assemble", "assemble (pid 8) is suspended by a signal: kill -CONT 8"),
    ]


def test_a_position_and_a_spool_that_need_somebody_are_problems() -> None:
    stored = StoredPosition("lake", "table steps", "claw.steps", "A", 3, 9)
    fits = Diagnosis(stored, "A", 0, 9, "ok")
    lost = Diagnosis(stored, "A", 0, 5, "beyond the end")
    named = problems(positions=[fits, lost], damaged=[Damage(Path("x.spool"), 2, 7)])
    assert [problem.what for problem in named] == [
        "beyond the end: lake, table steps, claw.steps-3",
        "x.spool: 7 bytes can't be read, 2 records can: the disk has lost records, or a crash "
        "truncated one",
    ]
    assert "`clawstream spool drain`" in str(named[1])


def test_the_exit_code_is_that_of_the_worst() -> None:
    without_kafka = problems(kafka_error="no Kafka answers", processes={"lake": row("restarting")})
    died = problems(left=["lake"], kafka_error="no Kafka answers")
    assert died[0].what == "`clawstream up` has died before it had stopped lake"
    assert problems(left=())[0].what == "nothing runs on data"
    assert [exit_code_of(p) for p in ([], problems(backlogs=STALLED), without_kafka, died)] == [
        0,
        EXIT_FAILED,
        EXIT_KAFKA,
        EXIT_FAILED,
    ]

"""Test the output of `clawstream status`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clawstream.ops.health import Observed, observed_here, problems_of
from clawstream.ops.lag import Backlog, by_topic
from clawstream.ops.processes import left_running, suspended_of
from clawstream.ops.progress import NEWEST, Progress, progress_of
from clawstream.ops.status import Status, format_status
from clawstream.runtime.exit_codes import EXIT_KAFKA
from clawstream.runtime.process.child import die_with_parent
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Refused, RolloutBudget, WeightVersion
from clawstream.schemas.settings import Settings

SETTINGS = Settings(data_dir=Path("d"), run_id="r")
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


def status_of(progress: Progress | None = None, **observed: Any) -> Status:
    seen = Observed(supervisor=1, **observed)
    problems = problems_of(seen, SETTINGS, 11.0)
    return Status(SETTINGS, seen, problems, by_topic(seen.backlogs, 11.0), progress)


def test_everything_is_ready() -> None:
    backlog = Backlog("claw-lake", "claw.steps", 0, 4, 0, 7, True, None, 5, True, 1_000, "ok")
    progress = Progress("r/3.0", 0.25, {"w": "ready, r/3.0"}, 2, 32, 4, {"stale": 3})
    status = status_of(progress, processes={"gateway": READY, "trainer": DONE}, backlogs=[backlog])
    assert status.exit_code == 0
    assert format_status(status).splitlines() == [
        "d: up (clawstream up, pid 1)",
        "  gateway    ready                http://h:1",
        "  trainer    done",
        "run r",
        "  version    r/3.0",
        "  the mean reward of the last versions is 0.25 below the best: training gets worse; "
        "see docs/training-gets-worse.md",
        "  worker     w: ready, r/3.0",
        "  groups     32 admitted in 2 batches, 4 refused; newest refusals: stale 3",
        "  lag        claw-lake claw.steps: 5 records, 10 s, ok",
        "no problem",
    ]


def test_a_process_that_stays_down_says_why() -> None:
    status = status_of(
        processes={"gateway": READY, "admit": DOWN}, kafka_error="Kafka does not answer"
    )
    assert status.exit_code == EXIT_KAFKA
    said = format_status(status)
    assert said.startswith("d: not all is well")
    assert "  admit      fenced               2 restarts; a newer one" in said
    assert "problem: Kafka does not answer\n  start Kafka at" in said
    assert said.splitlines()[-2:] == [
        "problem: admit is fenced",
        "  admit is fenced: a newer one; see d/logs/admit.log",
    ]
    shown = status.as_dict()
    assert [problem["kind"] for problem in shown["problems"]] == ["kafka", "process"]


def test_a_suspended_process_is_not_ready() -> None:
    child = subprocess.Popen(die_with_parent(["sleep", "60"]))
    parent = {**READY, "pid": os.getpid()}
    try:
        assert suspended_of(os.getpid(), {"admit": parent}) == {}
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        found = suspended_of(os.getpid(), {"admit": parent, "gone": {**READY, "pid": None}})
        assert found == {"admit": child.pid}
        assert suspended_of(child.pid, {}) == {"up": child.pid}
    finally:
        child.kill()
        child.wait()
    status = status_of(Progress(), processes={"admit": READY}, suspended={"admit": 8, "up": 9})
    said = format_status(status)
    assert "  admit      suspended            http://h:1" in said
    assert "  kill -CONT 9" in said and "kill -CONT 8" in said


def test_a_run_in_which_all_rewards_are_equal_says_so() -> None:
    def said(progress: Progress) -> bool:
        return "every group was refused as zero_variance" in format_status(status_of(progress))

    assert said(Progress(newest_refusals={"zero_variance": 9}))
    assert not said(Progress(newest_refusals={"zero_variance": 9, "stale": 1}))
    assert not said(Progress(admitted=1, batches=1, newest_refusals={"zero_variance": 9}))
    assert not said(Progress())


class Log:
    """The part of a cluster that is read, with records in memory."""

    def __init__(self, **topics: list[Any]) -> None:
        codec, names = Codec(), Settings().kafka.topics
        self._records = {
            getattr(names, name, names.ready_batches("r", "train")): [
                SimpleNamespace(offset=offset, value=codec.encode(event))
                for offset, event in enumerate(events)
            ]
            for name, events in topics.items()
        }

    def topics(self) -> dict[str, int]:
        return dict.fromkeys(self._records, 1)

    def watermarks(self, topic: str, partitions: list[int]) -> dict[int, tuple[int, int]]:
        return {0: (0, len(self._records[topic]))}

    def read_all(self, topic: str, first: int = 0) -> Any:
        return iter(self._records[topic][first:])


@pytest.mark.slow
def test_totals_and_version_are_of_the_whole_run() -> None:
    def version(run: str, sync: int) -> WeightVersion:
        return WeightVersion(
            version_id=f"{run}/{sync}.0", run_id=run, sync_index=sync, attempt=0, format="full",
            files=(), channel="train", metrics={"reward_fall": sync / 8}, created_at=1,
        )  # fmt: skip

    def budget(run: str, admitted: int) -> RolloutBudget:
        return RolloutBudget(
            run_id=run, channel="train", journal_id="J", read_to=9, next_batch_seq=admitted // 8,
            groups_admitted=admitted, groups_refused=70_000, replacements={},
            replacements_total=0, refusals=(), ended=False,
        )  # fmt: skip

    refused = Refused(
        run_id="r", channel="train", group_id="g", trajectory_ids=(), revisions=(), n=2,
        whole_group=True, reason="stale", detail="", input_topic_id="C", input_from=0, input_to=1,
    )  # fmt: skip
    versions = [version("r", 1), version("r", 2), *(version("o", n) for n in range(2 * NEWEST))]
    budgets = [budget("r", 8000), *(budget("o", n) for n in range(2 * NEWEST))]
    log = Log(weights=versions, budgets=budgets, batches_of_r=[refused] * (NEWEST + 1))
    found = progress_of(Settings(run_id="r"), log)  # type: ignore[arg-type]
    assert found == Progress("r/2.0", 0.25, {}, 1000, 8000, 70_000, {"stale": NEWEST})


def test_nothing_runs(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert observed_here(settings) == Observed()
    (tmp_path / "up.json").write_text(json.dumps({"supervisor": 1, "processes": {"lake": DONE}}))
    assert observed_here(settings).left == []


def test_what_a_supervisor_that_died_had_not_stopped_is_known(tmp_path: Path) -> None:
    assert left_running(tmp_path) == []
    stopped = DONE | {"state": "stopped"}
    rows = {"gateway": stopped, "lake": READY, "admit": DOWN, "trainer": DONE}
    (tmp_path / "up.json").write_text(json.dumps({"supervisor": 1, "processes": rows}))
    assert left_running(tmp_path) == ["lake"]

"""Test the verdict on a stored position against today's topics, and the offsets in a Delta log."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import freeze
from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.ops.position_check import Diagnosis, Verdict, diagnose, format_diagnoses
from clawstream.runtime.exit_codes import EXIT_KAFKA
from clawstream.runtime.topics.positions import StoredPosition
from clawstream.stream_jobs.lake.delta.log import read_committed_offsets
from clawstream.stream_jobs.lake.main import Lake
from clawstream.stream_jobs.lake.positions import recreated_topics

STARTS_A_SLEEPER = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""
ENDS = {("t", 0): (5, 9), ("t", 1): (0, 0)}


def position(
    topic_id: str | None = "A", partition: int = 0, offset: int = 7, topic: str = "t"
) -> StoredPosition:
    return StoredPosition("lake", "table x", topic, topic_id, partition, offset)


@pytest.mark.parametrize(
    ("stored", "verdict"),
    [
        (position(offset=5), "ok"),
        (position(offset=9), "ok"),
        (position(offset=4), "before the start"),
        (position(offset=10), "beyond the end"),
        (position(partition=1, offset=0), "ok"),
        (position(partition=2, offset=0), "beyond the end"),
        (position("B", offset=99), "topic recreated"),
        (position(None, offset=7), "ok"),
        (position(None, offset=10), "beyond the end"),
        (position(topic="gone"), "topic is gone"),
        (position("B", topic="some.*"), "topic recreated"),
        (StoredPosition("assemble", "changelog", "t", None, 0, 7, "garbage"), "unreadable"),
    ],
)
def test_verdicts(stored: StoredPosition, verdict: Verdict) -> None:
    found = diagnose(stored, {"t": "A"}, ENDS)
    assert found.verdict == verdict
    assert (found.to_do == "nothing") == (verdict == "ok")


def test_partitions_that_agree_share_a_line_but_no_trouble_is_hidden() -> None:
    stored = [position(partition=p, offset=o) for p, o in enumerate((1, 2, 30, 4))]
    found: list[Diagnosis] = [
        diagnose(p, {"t": "A"}, {("t", n): (0, 10) for n in range(4)}) for p in stored
    ]
    table, _, advice = format_diagnoses(found).partition("\n\n")
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["ok", "end", "ok"]
    assert "2 partitions" in table and advice == ""
    assert found[2].what == "beyond the end: lake, table x, t-2"
    assert found[2].to_do.startswith("t has lost records that lake has read: restore")
    assert format_diagnoses(found[:2]).endswith("every position fits its topic")
    assert format_diagnoses([]) == "no process has stored a position yet"


@pytest.mark.slow
def test_marks_are_found_behind_checkpoints_of_the_delta_log(tmp_path: Path) -> None:
    assert read_committed_offsets(str(tmp_path), "rewards", {}) == {}
    lake = Lake(str(tmp_path), {}, 10)
    lake.acquire()
    for n in range(1, 24):  # a checkpoint every 20 commits
        source = ("old", 0) if n < 3 else ("new", n % 3)
        assert (
            lake.append("rewards", [], {source: n}, lambda row, why: None, commit_offsets=True) == 0
        )
    assert list((tmp_path / "rewards" / "_delta_log").glob("*.checkpoint.parquet"))
    assert read_committed_offsets(str(tmp_path), "rewards", {}) == {
        ("old", 0): 2,
        ("new", 0): 21,
        ("new", 1): 22,
        ("new", 2): 23,
    }
    assert read_committed_offsets(str(tmp_path), "steps", {}) == {}


def test_a_topic_is_new_when_no_table_knows_its_id() -> None:
    stored = [position("A"), position("B"), position("C", topic="u"), position("D", topic="many.*")]
    assert list(recreated_topics(stored, {"t": "B", "u": "C"})) == []
    assert list(recreated_topics(stored, {"t": "new", "u": "C"})) == [("t", ["A", "B"])]


def test_a_suspended_broker_is_named_although_kafka_does_not_answer(tmp_path: Path) -> None:
    words = [sys.executable, "-c", STARTS_A_SLEEPER]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as wrapper,
        (tmp_path / "up.lock").open("w") as lock,
    ):
        assert wrapper.stdout is not None
        java = int(wrapper.stdout.readline())
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(os.getpid(), file=lock, flush=True)
        row = {"state": "running", "pid": wrapper.pid, "exit_code": None, "error": None}
        row |= {"ready": True, "status": "", "restarts": 0}
        (tmp_path / "up.json").write_text(json.dumps({"processes": {"broker": row}}))
        freeze(java)
        try:
            given = [f"data_dir={tmp_path}", "kafka.bootstrap_servers=127.0.0.1:1"]
            done = CliRunner().invoke(app, ["status", *given])
        finally:
            os.kill(java, signal.SIGKILL)
    assert "broker     suspended" in done.output
    assert f"broker (pid {java}) is suspended by a signal: kill -CONT {java}" in done.output
    assert done.exit_code == EXIT_KAFKA

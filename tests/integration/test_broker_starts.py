"""Starts of the embedded broker whose nodes never serve, and other failures of a start.

A Java stand-in that hangs replaces the nodes.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import until
from support.ports import free_port

from clawstream.runtime.broker.data_dir import one_starter
from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.runtime.broker.jvm import Jvm, NotReady
from clawstream.runtime.file_lock import exclusive

HANGS = """#!/bin/sh
case "$*" in
*XshowSettings*) echo "    java.specification.version = 25"; echo "    java.home = /none" ;;
*StorageTool*) for a; do case $a in *formatting.properties) \
mkdir "${a%.properties}" ;; esac; done ;;
*) trap '' TERM; while :; do sleep 0.2; done ;;
esac
"""


@pytest.fixture
def java(tmp_path: Path) -> str:
    """Return a Java that formats, and whose nodes neither serve nor end on SIGTERM."""
    path = tmp_path / "java"
    path.write_text(HANGS)
    path.chmod(0o755)
    return str(path)


def test_another_start_is_waited_for_with_a_bound(tmp_path: Path, java: str) -> None:
    with (
        one_starter(tmp_path),
        pytest.raises(NotReady, match=r"another start of the broker on .* is under way"),
    ):
        EmbeddedBroker(tmp_path, free_port(), java=java).start(patience_s=0.0)


def test_who_waits_for_a_lock_is_told_so(tmp_path: Path) -> None:
    told: list[float] = []
    with exclusive(tmp_path / "lock", RuntimeError()):
        with pytest.raises(RuntimeError, match="late"):
            with exclusive(
                tmp_path / "lock", RuntimeError("late"), 0.5, told.append, report_every_s=0.1
            ):
                pass
    assert told and told == sorted(told)
    with exclusive(tmp_path / "lock", RuntimeError(), 0.0):
        pass


def test_what_a_jvm_has_started_ends_with_it(tmp_path: Path) -> None:
    jvm = Jvm(
        ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/child; wait"],
        tmp_path / "out",
    )
    until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "the child")
    child = int((tmp_path / "child").read_text())
    jvm.end(0.0)
    assert jvm.exit_code == 128 + signal.SIGKILL
    until(lambda: not runs(child), "the child is gone")


PARENT = """
import signal, sys, time
from pathlib import Path
from clawstream.runtime.broker.jvm import Jvm
jvm = Jvm(["sh", "-c", "trap '' TERM; while :; do sleep 0.2; done"], \
Path(sys.argv[1]), parent_death_signal=signal.SIGKILL)
print(jvm.pid, flush=True)
time.sleep(600)
"""


def test_a_jvm_that_is_to_die_with_its_parent_at_once_does(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: ignores_term(pid), "it ignores SIGTERM")
        parent.kill()
    until(lambda: not runs(pid), "the JVM is gone")


def ignores_term(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn")
    )
    return bool(mask >> (signal.SIGTERM - 1) & 1)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False

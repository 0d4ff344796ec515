"""The processes of a data directory, as the table of their supervisor and the kernel show them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawstream.runtime.exit_codes import NAMES
from clawstream.runtime.process.supervisor import supervisor_of
from clawstream.runtime.process.table import read_table

Rows = Mapping[str, Mapping[str, Any]]
"""Rows of the supervisor's table by process."""


def processes_of(directory: Path) -> tuple[int | None, Rows]:
    """Return the pid and table of a directory's running supervisor; ignores that of a dead one."""
    pid = supervisor_of(directory)
    rows: Rows = read_table(directory).get("processes", {}) if pid is not None else {}
    return pid, rows


def suspended_of(supervisor: int | None, processes: Rows) -> dict[str, int]:
    """Return the processes of this machine that are suspended, each with the pid to continue."""
    found = {} if supervisor is None or not _is_stopped(supervisor) else {"up": supervisor}
    for name, row in processes.items():
        if row["pid"] is not None and (pid := suspended(row["pid"])) is not None:
            found[name] = pid
    return found


def suspended(pid: int) -> int | None:
    """Return a process of this machine that is stopped: this one, or one that it started, such as
    the broker's Java.
    """
    if _is_stopped(pid):
        return pid
    try:
        started = [
            int(child)
            for children in Path(f"/proc/{pid}/task").glob("*/children")
            for child in children.read_text().split()
        ]
    except OSError:  # it has ended
        return None
    return next((found for child in started if (found := suspended(child)) is not None), None)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is in state T of proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended
        return False


def has_ended(row: Mapping[str, Any]) -> bool:
    """Return whether a process was asked to stop, or has done its work.

    Args:
        row: Of the supervisor's table.
    """
    return row["state"] in ("stopped", NAMES[0])


def left_running(directory: Path) -> list[str]:
    """Return the processes that the last supervisor of a directory had not stopped at its end."""
    rows: Rows = read_table(directory).get("processes", {})
    return [name for name, row in rows.items() if row["state"] in ("running", "restarting")]


def wait_until_down(directory: Path, timeout_s: float) -> bool:
    """Wait until no supervisor works on the directory; False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while supervisor_of(directory) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True

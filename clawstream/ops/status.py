"""`clawstream status`: processes of a data directory, their readiness and the run's progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawstream.ops.progress import Progress
from clawstream.runtime.exit_codes import EXIT_FAILED, EXIT_KAFKA

ALL_EQUAL = "zero_variance"


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a data directory.

    supervisor: Pid of `clawstream up`, or None. processes: Rows of its table. progress: None when
    Kafka does not answer. suspended: Process to the pid of it, or of one that it started, that a
    signal has stopped.
    """

    data_dir: Path
    run_id: str
    supervisor: int | None
    processes: Mapping[str, Mapping[str, Any]]
    progress: Progress | None
    suspended: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        """Whether Kafka answers, and every process is ready and runs, or has done its work."""
        rows = self.processes.values()
        return (
            self.supervisor is not None
            and bool(rows)
            and all(r["ready"] or r["exit_code"] == 0 for r in rows)
            and not self.suspended
            and self.progress is not None
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        if self.is_up:
            return 0
        return EXIT_FAILED if self.supervisor is None or self.progress else EXIT_KAFKA


def format_status(status: Status) -> str:
    """Format a status for a terminal."""
    if status.supervisor is None:
        lines = [f"{status.data_dir}: nothing runs"]
    else:
        state = "up" if status.is_up else "not all is ready"
        lines = [f"{status.data_dir}: {state} (clawstream up, pid {status.supervisor})"]
    for name, row in status.processes.items():
        ready = "ready" if row["ready"] else str(row["state"])
        if name in status.suspended:
            ready = "suspended"
        if ready == "running":
            ready = "running, not ready"
        restarts = f"{row['restarts']} restarts" if row["restarts"] else None
        resume = f"kill -CONT {status.suspended[name]}" if name in status.suspended else None
        about = "; ".join(str(x) for x in (row["status"], resume, restarts, row["error"]) if x)
        lines.append(f"  {name:<10} {ready:<20} {about}".rstrip())
    if "up" in status.suspended:
        lines.append(f"  clawstream up is suspended: kill -CONT {status.suspended['up']}")
    lines.append(f"run {status.run_id}")
    progress = status.progress
    if progress is None:
        return "\n".join([*lines, "  Kafka does not answer"])
    lines.append(f"  version    {progress.version or 'none yet'}")
    if progress.reward_fall is not None:
        lines.append(
            f"  the mean reward of the last versions is {progress.reward_fall:.3g} below the best: "
            "training gets worse; see docs/training-gets-worse.md"
        )
    lines += [f"  worker     {worker}: {state}" for worker, state in progress.serving.items()]
    behind = [f"{group} {records}" for group, records in progress.lag.items() if records]
    lines.append(f"  lag        {', '.join(behind) or 'none'}")
    reasons = ", ".join(f"{why} {count}" for why, count in progress.newest_refusals.items())
    lines.append(
        f"  groups     {progress.admitted} admitted in {progress.batches} batches, "
        f"{progress.refused} refused{f'; newest refusals: {reasons}' if reasons else ''}"
    )
    if not progress.admitted and set(progress.newest_refusals) == {ALL_EQUAL}:
        lines.append(
            "  every group was refused as zero_variance: its members' rewards are all equal, so "
            "there is nothing to learn; check the reward functions and the task"
        )
    return "\n".join(lines)

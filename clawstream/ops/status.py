"""`clawstream status`: processes, lag, progress and problems of an installation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from clawstream.ops.health import Observed, Problem, exit_code_of, observed_here, problems_of
from clawstream.ops.lag import GroupLag, by_topic
from clawstream.ops.monitoring.watch import LagWatch
from clawstream.ops.position_check import examine, format_diagnoses, stored_positions
from clawstream.ops.progress import Progress, progress_of
from clawstream.ops.spool_drain import damaged
from clawstream.runtime.kafka import Cluster, KafkaError
from clawstream.schemas.settings import Settings

ALL_EQUAL = "zero_variance"
PATIENCE_S = 5.0
"""How long Kafka is looked for."""


@dataclass(frozen=True, slots=True)
class Status:
    """Status of an installation at one time.

    progress: None when Kafka does not answer. left_out: Positions that need libraries which are
    not installed here. with_positions: Whether positions were looked at.
    """

    settings: Settings
    observed: Observed
    problems: Sequence[Problem]
    lag: Sequence[GroupLag] = ()
    progress: Progress | None = None
    left_out: Sequence[str] = ()
    with_positions: bool = False

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 without a problem."""
        return exit_code_of(self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the status for a program to read."""
        return {
            "data_dir": self.settings.data_dir,
            "run_id": self.settings.run_id,
            "supervisor": self.observed.supervisor,
            "processes": self.observed.processes,
            "progress": None if self.progress is None else asdict(self.progress),
            "lag": [asdict(lag) for lag in self.lag],
            "problems": [problem._asdict() for problem in self.problems],
        }


class Watch:
    """Takes the status again and again. Only one thread may call it."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings, self._cluster = settings, cluster
        self._lags = LagWatch(cluster, settings)

    def take(self, until_judged: bool = True, with_positions: bool = False) -> Status:
        """Return the status now.

        Args:
            until_judged: Watch until every consumer is judged, some 15 s if one does not read.
            with_positions: Compare the stored positions of all processes with the topics.
        """
        settings, cluster = self._settings, self._cluster
        observed = replace(observed_here(settings), damaged=damaged(settings))
        progress: Progress | None = None
        left_out = list[str]()
        try:
            cluster.ask(PATIENCE_S)
            progress = progress_of(settings, cluster)
            lags = self._lags
            judged = lags.poll_until_judged(observed.processes) if until_judged else lags.poll()
            observed = replace(observed, backlogs=judged)
            if with_positions:
                positions, left_out = stored_positions(settings, cluster)
                observed = replace(observed, positions=examine(cluster, positions))
        except KafkaError as error:
            observed, progress = replace(observed, kafka_error=str(error)), None
        now_s = time.time()
        return Status(
            settings,
            observed,
            problems_of(observed, settings, now_s),
            by_topic(observed.backlogs, now_s),
            progress,
            left_out,
            with_positions,
        )


def format_status(status: Status) -> str:
    """Format a status for a terminal: the problems come last."""
    observed, settings = status.observed, status.settings
    lines = [f"{settings.data_dir}: nothing runs"]
    if observed.supervisor is not None:
        state = "not all is well" if status.problems else "up"
        lines = [f"{settings.data_dir}: {state} (clawstream up, pid {observed.supervisor})"]
    lines += [_process(name, row, observed) for name, row in observed.processes.items()]
    if status.progress is not None:
        lines += [f"run {settings.run_id}", *_progress(status.progress)]
        lines += [_lag(lag) for lag in status.lag if lag.records and lag.status]
    if status.with_positions:
        lines += ["", format_diagnoses(observed.positions), "", *status.left_out]
    lines += [f"problem: {problem.what}\n  {problem.remedy}" for problem in status.problems]
    return "\n".join(lines if status.problems else [*lines, "no problem"])


def _process(name: str, row: Mapping[str, Any], observed: Observed) -> str:
    state = "ready" if row["ready"] else str(row["state"])
    if name in observed.suspended:
        state = "suspended"
    elif state == "running":
        state = "running, not ready"
    restarts = f"{row['restarts']} restarts" if row["restarts"] else None
    about = "; ".join(str(x) for x in (row["status"], restarts, row["error"]) if x)
    return f"  {name:<10} {state:<20} {about}".rstrip()


def _lag(lag: GroupLag) -> str:
    return (
        f"  lag        {lag.group} {lag.topic}: {'' if lag.exact else 'at most '}{lag.records} "
        f"records, {lag.waiting_s:.0f} s, {lag.status}"
    )


def _progress(progress: Progress) -> list[str]:
    lines = [f"  version    {progress.version or 'none yet'}"]
    if progress.reward_fall is not None:
        lines.append(
            f"  the mean reward of the last versions is {progress.reward_fall:.3g} below the best: "
            "training gets worse; see docs/training-gets-worse.md"
        )
    lines += [f"  worker     {worker}: {state}" for worker, state in progress.serving.items()]
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
    return lines

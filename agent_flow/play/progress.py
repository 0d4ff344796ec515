"""What a user sees while a flow runs, and the summary at its end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean as mean
from types import TracebackType
from typing import Any, Self

from clawstream.agent_flow.outcome import Ended

LINE_EVERY_S = 10.0
SHOWN_REASONS = 3
WINDOW = 256
"""Newest rewards whose mean is shown: the policy changes while a flow is played."""


class Progress:
    """Counts rollouts that ended; shows a bar on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.groups = self.played_before = 0
        self._rewards: list[float] = []
        self._shown = self._began
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.completed:.0f} rollouts, {task.description}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("none ended yet", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def resumed(self, groups: int, directory: Path) -> None:
        """Say that groups were played before."""
        self.played_before = groups
        sys.stderr.write(f"{groups} groups were played before and are left out: {directory}\n")

    def ended(self, ended: Ended) -> None:
        """Count a rollout."""
        self.outcomes[ended.outcome] += 1
        if ended.reward is not None:
            self._rewards.append(ended.reward)
        if ended.reason is not None:
            self.reasons[ended.reason] += 1
        text = "no reward yet"
        if self._rewards:
            text = f"reward {mean(self._rewards[-WINDOW:]):.3f}"
            if len(self._rewards) > WINDOW:
                text += f" (last {WINDOW}), {self.mean_reward:.3f} since the start"
        if failed := self.outcomes["failed"] + self.outcomes["abandoned"]:
            text += f", {failed} failed"
        if self._bar is not None:
            done = sum(self.outcomes.values()) - self.outcomes["replaced"]
            self._bar.update(self._task, completed=done, description=text)
        elif time.monotonic() - self._shown > LINE_EVERY_S:
            self._shown = time.monotonic()
            sys.stderr.write(f"{sum(self.outcomes.values())} rollouts, {text}\n")

    @property
    def mean_reward(self) -> float:
        """Mean of the rewards; nan without any."""
        return mean(self._rewards) if self._rewards else float("nan")

    @property
    def succeeded(self) -> bool:
        """Whether a rollout was completed, or none was played."""
        return self.outcomes["completed"] > 0 or not self.outcomes

    def summary(self) -> dict[str, Any]:
        """Return the counts for machines.

        reward_mean is over the rollouts with a reward, reward_mean_last over the last WINDOW of
        them; None without any.
        """
        return {
            "groups": self.groups,
            "groups_before": self.played_before,
            "rollouts": {name: self.outcomes[name] for name in sorted(self.outcomes)},
            "rewards": len(self._rewards),
            "reward_mean": round(self.mean_reward, 6) if self._rewards else None,
            "reward_mean_last": round(mean(self._rewards[-WINDOW:]), 6) if self._rewards else None,
            "reasons": dict(self.reasons.most_common(SHOWN_REASONS)),
            "seconds": round(time.monotonic() - self._began, 1),
        }

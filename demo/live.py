"""The live view of the demo: one table on a terminal, one line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from clawstream.demo.episodes import Player
from clawstream.demo.feed import LoopState
from clawstream.ops.lag import lag
from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.topics.records import cluster_of
from clawstream.schemas.settings import Settings

LINE_EVERY_S = 10.0
TABLE_EVERY_S = 1.0
LAG_EVERY_S = 5.0


class Live:
    """Shows versions, reward, steps per second and lag; measures the duration of each phase."""

    def __init__(self, settings: Settings, started: float) -> None:
        self._settings, self._started = settings, started
        self._cluster = cluster_of(settings)
        self.state: LoopState | None = None
        self.player: Player | None = None
        self.phases: dict[str, float] = {}
        self._phase, self._phase_began = "", started
        self._end = threading.Event()
        self._last = (started, 0)
        self._lag: dict[str, int] = {}
        self._lag_at = 0.0

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop, name="live", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join(5.0)

    def show(self, text: str) -> None:
        """Set and show the current activity."""
        self._phase = text
        if not sys.stderr.isatty():
            sys.stderr.write(f"[{time.monotonic() - self._started:5.0f} s] {text}\n")

    def phase_done(self, name: str) -> None:
        """Record the duration of the phase that ends now, in seconds."""
        now = time.monotonic()
        self.phases[name] = round(now - self._phase_began, 1)
        self._phase_began = now

    def _figures(self) -> dict[str, str]:
        out = {"now": self._phase, "seconds": f"{time.monotonic() - self._started:.0f}"}
        state, player = self.state, self.player
        if state is not None and (newest := state.published) is not None:
            metrics = state.versions[newest].metrics
            out["version published / loaded"] = f"{newest} / {state.loaded}"
            out["batches"] = str(state.batches)
            if "reward_mean" in metrics:
                out["reward"] = f"{metrics['reward_mean']:.3f}"
        if player is not None:
            now, turns = time.monotonic(), player.turns_answered
            then, before = self._last
            self._last = (now, turns)
            out["steps/s"] = f"{(turns - before) / max(now - then, 1e-3):.0f}"
            out["steps"] = str(turns)
        if self._lag:
            out["lag"] = " ".join(f"{g} {n}" for g, n in self._lag.items())
        return out

    def _refresh_lag(self) -> None:
        if self.player is None or time.monotonic() - self._lag_at < LAG_EVERY_S:
            return
        self._lag_at = time.monotonic()
        prefix = self._settings.kafka.topic_prefix + "-"
        try:
            rows = lag(self._cluster, self._settings, scan_records=0)
        except PlumbingError:
            return  # the broker restarts; the view keeps the last figures
        totals: dict[str, int] = {}
        for row in rows:
            name = row.group.removeprefix(prefix).partition(".")[0]
            totals[name] = totals.get(name, 0) + row.offsets
        self._lag = totals

    def _loop(self) -> None:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live as RichLive
            from rich.table import Table

            with RichLive(console=Console(stderr=True), refresh_per_second=2) as view:
                while not self._end.wait(TABLE_EVERY_S):
                    self._refresh_lag()
                    table = Table(title="python -m clawstream.demo", show_header=False)
                    for name, value in self._figures().items():
                        table.add_row(name, value)
                    view.update(table)
            return
        while not self._end.wait(LINE_EVERY_S):
            self._refresh_lag()
            sys.stderr.write(
                "  "
                + "  ".join(f"{k}={v}" for k, v in self._figures().items() if k != "now")
                + "\n"
            )

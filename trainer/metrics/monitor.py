"""Show the metrics of versions: Prometheus, TensorBoard, and a chart at the end.

The log line of a version is written where it is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from clawstream.runtime.chart import Line, Panel, draw
from clawstream.runtime.logs import logger
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.metrics.prometheus import VersionMetrics
from clawstream.trainer.metrics.tensorboard import TensorBoardFiles
from clawstream.trainer.metrics.validation import Validation

PANELS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("reward", ("reward_mean", "val/reward_mean")),
    ("loss", ("loss",)),
    ("gradient norm", ("grad_norm", "grad_norm_max")),
    ("entropy, nats", ("entropy",)),
    ("divergence, nats", ("kl_sampled", "kl_reference")),
    ("share of tokens", ("clip_fraction", "correction_fraction", "ratio_ess")),
    ("trained tokens of a trajectory", ("length_mean",)),
    ("staleness, versions", ("staleness_mean", "staleness_max")),
    ("engine to trainer, nats", ("logp_mean_abs_diff_same_version",)),
    ("critic", ("value_loss", "explained_variance")),
    ("tokens a second", ("tokens_per_second",)),
)
"""Title and metrics of each panel of the chart. A panel without a value is left out."""
INTERVALS: Mapping[str, str] = {"val/reward_mean": "val/reward_interval"}


class Sink(Protocol):
    """Where metrics are shown."""

    def write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a version."""

    def close(self) -> None:
        """Finish."""


class Monitor:
    """Shows each version, and each change of a validation, in every sink of the settings."""

    def __init__(
        self,
        settings: Settings,
        shown: int,
        next_sync_index: int,
        prometheus: VersionMetrics | None = None,
    ) -> None:
        """Open the other sinks.

        Args:
            settings: `trainer.tensorboard_dir` and the chart's directory.
            shown: number of versions on the weights log that an earlier process has shown.
            next_sync_index: of the next version.
            prometheus: what the process serves at /metrics; None: nothing.
        """
        t = settings.trainer
        self._shown, self._chart = shown, chart_path(settings)
        self._sinks: list[Sink] = [] if prometheus is None else [prometheus]
        if t.tensorboard_dir is not None:
            directory = t.tensorboard_dir / settings.run_id
            try:
                self._sinks.append(TensorBoardFiles(directory, next_sync_index))
            except OSError as e:
                _log_failed("TensorBoardFiles", e)

    def versions(self, versions: Sequence[WeightVersion]) -> None:
        """Show the versions that are new. versions: all, in log order."""
        for version in versions[self._shown :]:
            self._write(version.sync_index, version.metrics)
        self._shown = len(versions)

    def validation(self, validation: Validation) -> None:
        """Show and log what the validation of a version has come to."""
        logger().info(
            "version_validated",
            sync_index=validation.sync_index,
            **{name: round(value, 6) for name, value in validation.metrics.items()},
        )
        self._write(validation.sync_index, validation.metrics)

    def _write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        """Write to every sink. One that fails, on a full disk for example, is not used again."""
        for sink in self._sinks[:]:
            try:
                sink.write(sync_index, metrics)
            except OSError as e:
                self._sinks.remove(sink)
                _log_failed(type(sink).__name__, e)

    def close(self, versions: Sequence[WeightVersion]) -> None:
        """Close the sinks and draw the chart of the run's versions, if one was trained."""
        self.versions(versions)
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as e:
                _log_failed(type(sink).__name__, e)
        panels = chart_panels(versions)
        if not panels:
            return
        try:
            draw(self._chart, panels, "weight version")
        except OSError as e:
            logger().warning("chart_not_written", path=str(self._chart), error=str(e))
        else:
            logger().info("chart_written", path=str(self._chart))


def _log_failed(sink: str, error: OSError) -> None:
    logger().error(
        "metrics_not_shown",
        sink=sink,
        error=str(error),
        action="training goes on; this sink shows nothing more until the trainer starts again",
    )


def chart_path(settings: Settings) -> Path:
    """Return where the chart of the run is written."""
    return settings.data_dir / f"training-{settings.run_id}.png"


def chart_panels(versions: Sequence[WeightVersion]) -> list[Panel]:
    """Return the panels that have a value, by sync index. Of equal ones the last version counts."""
    newest = {v.sync_index: v.metrics for v in versions}
    panels = []
    for title, names in PANELS:
        lines = [line for name in names if (line := _line(name, newest)) is not None]
        if lines:
            panels.append(Panel(title, lines))
    return panels


def _line(name: str, metrics: Mapping[int, Mapping[str, float]]) -> Line | None:
    """Return the line of one metric, or None without a value. metrics: by sync index."""
    known = [(index, m) for index, m in sorted(metrics.items()) if name in m]
    if not known:
        return None
    width = INTERVALS.get(name)
    return Line(
        name,
        [(index, m[name]) for index, m in known],
        None if width is None else [m.get(width, 0.0) for _, m in known],
        dots=width is not None,
    )

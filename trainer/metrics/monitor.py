"""Show the metrics of versions: Prometheus and TensorBoard.

The log line of a version is written where it is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from clawstream.runtime.logs import logger
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.metrics.prometheus import VersionMetrics
from clawstream.trainer.metrics.tensorboard import TensorBoardFiles
from clawstream.trainer.metrics.validation import Validation


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
            settings: `trainer.tensorboard_dir`.
            shown: number of versions on the weights log that an earlier process has shown.
            next_sync_index: of the next version.
            prometheus: what the process serves at /metrics; None: nothing.
        """
        t = settings.trainer
        self._shown = shown
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
        """Show the versions that are new, and close the sinks."""
        self.versions(versions)
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as e:
                _log_failed(type(sink).__name__, e)


def _log_failed(sink: str, error: OSError) -> None:
    logger().error(
        "metrics_not_shown",
        sink=sink,
        error=str(error),
        action="training goes on; this sink shows nothing more until the trainer starts again",
    )

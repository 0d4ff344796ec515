"""The metrics as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from trainer.metrics.definitions import SECTION_OF


class TensorBoardFiles:
    """Writes scalars by sync index. The section of a metric is the part of its tag before `/`."""

    def __init__(self, directory: Path, next_sync_index: int) -> None:
        """Add an event file to a directory.

        Args:
            directory: of the run.
            next_sync_index: of the next version; TensorBoard forgets what an abandoned trainer
                wrote from there on.
        """
        self._writer = SummaryWriter(str(directory), purge_step=next_sync_index)

    def write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a version."""
        for name, value in metrics.items():
            tag = name if "/" in name else f"{SECTION_OF[name]}/{name}"
            self._writer.add_scalar(tag, value, sync_index)
        self._writer.flush()

    def close(self) -> None:
        """Write everything and close the file."""
        self._writer.close()

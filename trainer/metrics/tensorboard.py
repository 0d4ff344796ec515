"""The metrics as TensorBoard event files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from trainer.metrics.definitions import SECTION_OF


class TensorBoardFiles:
    """Writes scalars by sync index. The section of a metric is the part of its tag before `/`.

    It writes in the thread of the caller. tensorboardX's `SummaryWriter` has a thread of its own:
    after an error of that thread, for example on a full disk, every caller waits forever.
    """

    def __init__(self, directory: Path, next_sync_index: int) -> None:
        """Add an event file to a directory.

        Args:
            directory: of the run.
            next_sync_index: of the next version; TensorBoard forgets what an abandoned trainer
                wrote from there on.

        Raises:
            OSError: the directory cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        self._write(Event(step=next_sync_index, session_log=SessionLog(status=SessionLog.START)))

    def write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a version. Raises OSError."""
        values = [
            Summary.Value(
                tag=name if "/" in name else f"{SECTION_OF[name]}/{name}", simple_value=value
            )
            for name, value in metrics.items()
        ]
        self._write(Event(step=sync_index, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._writer.close()

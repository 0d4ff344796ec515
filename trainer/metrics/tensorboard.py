"""The metrics as TensorBoard event files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from clawstream.trainer.metrics.definitions import SECTION_OF


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
        self._validations = _validations(directory, next_sync_index)
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        self._write(Event(step=next_sync_index, session_log=SessionLog(status=SessionLog.START)))

    def write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a version. Raises OSError.

        A validation that is in the files already, because each start of the trainer reads all of
        them again, is left out.
        """
        values = [
            Summary.Value(
                tag=name if "/" in name else f"{SECTION_OF[name]}/{name}", simple_value=value
            )
            for name, value in metrics.items()
        ]
        new = [v for v in values if self._validations.get((v.tag, sync_index)) != v.simple_value]
        if new:
            self._write(Event(step=sync_index, summary=Summary(value=new)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._writer.close()


def _validations(directory: Path, next_sync_index: int) -> dict[tuple[str, int], float]:
    """Return tag and step of the validations in the event files, with their last values.

    A record is its length, a checksum of it, the event, and a checksum of it. The last one of a
    killed process may be incomplete.
    """
    found: dict[tuple[str, int], float] = {}
    for file in sorted(directory.glob("events*")):
        data, at = file.read_bytes(), 0
        while at + 8 <= len(data):
            end = at + 12 + int.from_bytes(data[at : at + 8], "little")
            if end > len(data):
                break
            event = Event.FromString(data[at + 12 : end])
            if event.session_log.status == SessionLog.START:
                found = {place: v for place, v in found.items() if place[1] < event.step}
            for value in event.summary.value:
                if value.tag.startswith("val/"):
                    found[value.tag, event.step] = value.simple_value
            at = end + 4
    return {place: value for place, value in found.items() if place[1] < next_sync_index}

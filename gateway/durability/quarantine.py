"""The files of a spool that wait for the operator and `clawstream spool drain`.

- `quarantined/`: segments that are too old to be sent automatically (`spool_drainer` explains why);
- `damaged/`: segments with unreadable parts, unchanged. Their readable records were sent;
- `rejected`: records that Kafka will never accept, or that cannot be read to make them fit, in the
  format of a segment.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from clawstream.gateway.durability.log import Message
from clawstream.gateway.durability.segment import read_segment, segments_in
from clawstream.gateway.durability.spool_frames import frame
from clawstream.runtime.atomic_file import fsync_path

QUARANTINED, DAMAGED, REJECTED = "quarantined", "damaged", "rejected"
_REJECTED_SYNC = b"reject\xff\xff"


class Damage(NamedTuple):
    """A segment in `damaged/`. readable: Number of its records that can be read."""

    path: Path
    readable: int
    unreadable_bytes: int

    @property
    def what(self) -> str:
        """The damage."""
        return (
            f"{self.path}: {self.unreadable_bytes} bytes can't be read, {self.readable} records "
            "can: the disk has lost records, or a crash truncated one"
        )

    @property
    def to_do(self) -> str:
        """The action to take."""
        return (
            "`clawstream spool drain` sends what can be read, remove the file to give up the rest"
        )

    def __str__(self) -> str:
        return f"{self.what}; {self.to_do}"


def damaged_in(directory: Path) -> list[Damage]:
    """List the damaged segments of one gateway's spool. Raises OSError and SpoolFailed."""
    found = [(path, read_segment(path)) for path in segments_in(directory / DAMAGED)]
    return [
        Damage(path, len(contents.messages), contents.unreadable_bytes) for path, contents in found
    ]


def move_to(name: str, directory: Path, path: Path) -> Path:
    """Move a segment durably into `quarantined` or `damaged` of a spool, unless it is there.

    Returns:
        Its new path.
    """
    target = directory / name / path.name
    if path != target:
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        fsync_path(target.parent)
        fsync_path(path.parent)
    return target


def reject(directory: Path, message: Message) -> Path:
    """Append a record that can never be sent to the file `rejected`.

    The record then does not block the records behind it.

    Returns:
        The path of the file.
    """
    path = directory / REJECTED
    with path.open("ab") as file:
        file.write(frame(message, _REJECTED_SYNC))
        file.flush()
        os.fsync(file.fileno())
    return path


def bytes_in(directory: Path) -> int:
    """Return the bytes of the segments in a directory.

    Another process or the operator may remove segments at any time.
    """
    total = 0
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".spool"):
                with suppress(FileNotFoundError):
                    total += entry.stat().st_size
    return total

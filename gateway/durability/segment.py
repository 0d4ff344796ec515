"""A file of the spool: its name, its contents, and reading it from a failing disk.

The name is `<number>-<sync marker>.spool`. The suffix `-sent` after the marker means that some
records of the segment may already be in Kafka, whichever way they were sent. `spool_frames` defines
the format of a record.

A segment begins with the end position of the steps topic at the time of its first record, if that
position was known. The position is written twice, each time in its own frame.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from clawstream.gateway.durability.log import LogPosition, Message
from clawstream.gateway.durability.spool_frames import SYNC_BYTES, frame, scan
from clawstream.gateway.errors import SpoolFailed
from clawstream.runtime.logs import logger

BLOCK_BYTES = 4096
"""Block size for reading a file that the disk does not return as a whole."""
_NAME = re.compile(rf"([0-9]+)-([0-9a-f]{{{2 * SYNC_BYTES}}})(?:-sent)?\.spool")
_POSITION = Message("", b"position", b"")
"""Topic and key of the frames that hold the position of a segment in the steps topic."""


class Contents(NamedTuple):
    """The contents of a segment.

    position: End of the steps topic when the segment began; None: unknown.
    """

    messages: list[Message]
    unreadable_bytes: int
    position: LogPosition | None


@dataclass(slots=True)
class Segment:
    """One file of the spool.

    keys: Number of records per key.
    unreadable: Unreadable bytes found by the last read.
    position: End of the steps topic when the segment began; None: unknown.
    began: Time of its start on the clock of `Spool`; None: an earlier process created the segment.
    """

    path: Path
    size: int = 0
    keys: Counter[bytes] = field(default_factory=Counter)
    unreadable: int = 0
    position: LogPosition | None = None
    began: float | None = None

    @property
    def maybe_sent(self) -> bool:
        """Whether some of its records may already be in Kafka."""
        return self.path.stem.endswith("-sent")


def sync_of(path: Path) -> bytes:
    """Return the sync marker in the name of a segment.

    Raises:
        SpoolFailed: The file name is not a segment name.
    """
    if (name := _NAME.fullmatch(path.name)) is not None:
        return bytes.fromhex(name[2])
    raise SpoolFailed(
        f"{path} is not named as a segment of a spool: its name holds what is needed to read it"
    )


def number_of(path: Path) -> int:
    """Return the number in the name of a segment; 0 for another file."""
    name = _NAME.fullmatch(path.name)
    return 0 if name is None else int(name[1])


def segments_in(directory: Path) -> list[Path]:
    """Return the segments in a directory, oldest first. Logs the names of other files like them."""
    files = sorted(directory.glob("*.spool"))
    if foreign := [path.name for path in files if not number_of(path)]:
        logger().warning(
            "spool_foreign_files", directory=str(directory), names=foreign,
            action="they are not segments and are not sent: remove or rename them",
        )  # fmt: skip
    return [path for path in files if number_of(path)]


def position_frames(position: LogPosition, sync: bytes) -> bytes:
    """Encode the position of a segment."""
    return 2 * frame(_POSITION._replace(value=position.dump()), sync)


def read_segment(path: Path) -> Contents:
    """Read the readable records of a segment; count its unreadable bytes.

    Raises:
        OSError: The file cannot be read. A disk error (EIO) is not raised: its block is unreadable.
        SpoolFailed: The file name is not a segment name.
    """
    found = scan(_bytes_of(path), sync_of(path))
    positions = [LogPosition.load(m.value) for m in found.messages if m.topic == _POSITION.topic]
    messages = [m for m in found.messages if m.topic != _POSITION.topic]
    return Contents(messages, found.unreadable_bytes, positions[0] if positions else None)


def _bytes_of(path: Path) -> bytes:
    """Read a file; blocks that the disk cannot return are zeros."""
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        try:
            return _read(fd, size, 0)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        blocks = []
        for at in range(0, size, BLOCK_BYTES):
            length = min(BLOCK_BYTES, size - at)
            try:
                blocks.append(_read(fd, length, at))
            except OSError:
                blocks.append(bytes(length))
        return b"".join(blocks)
    finally:
        os.close(fd)


def _read(fd: int, length: int, at: int) -> bytes:
    pieces, end = [], at + length
    while at < end and (piece := os.pread(fd, end - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)

"""The spool: records that Kafka has not acknowledged, on disk and in order until Kafka returns.

The spool is a directory of append-only segments `<number>-<sync marker>.spool`. The suffix `-sent`
after the marker means that some records of the segment may already be in Kafka, whichever way they
were sent. `spool_frames` defines the format of a record in a segment.

A record is durable once it is fsynced; only then may its reply be sent. A segment is deleted when
Kafka has acknowledged all of its records. A crash before the deletion causes a second send, which
is harmless: readers drop duplicates by id. No send position is stored, so none can be wrong.

A segment begins with the end position of the steps topic at the time of its first record, if that
position was known. The age of a segment is measured by the records that the topic has received
since, not by a wall clock. The position is written twice, each time in its own frame.

Damage to a segment loses only the records that it hits. The readable records are sent. Then the
file is not deleted but moved, unchanged, into the directory `damaged`: `clawstream doctor` lists
it, and `clawstream spool drain` sends the records that are readable by then. A last record that a
crash cut off, and that was never replied to, looks the same and is kept the same way.

A segment that is too old to be sent automatically (`delivery` explains why) is moved into the
directory `held`, where `clawstream spool drain` finds it while the gateway runs. Held and damaged
segments count towards the size limit until they are removed.

Blocking and not thread-safe: the owner (`delivery`) calls it from one thread at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gateway.durability.log import LogPosition, Message
from gateway.durability.spool_frames import SYNC_BYTES, frame, scan
from gateway.errors import SpoolFailed, SpoolFull, SpoolTaken
from runtime.atomic_file import fsync_path
from runtime.logs import logger

SEGMENT_BYTES = 1 << 20
DISK_RESERVE_BYTES = 1 << 20
"""Disk space that the spool leaves free: a file takes slightly more space than its length."""
HELD, DAMAGED, REFUSED = "held", "damaged", "refused"
READ_BYTES = 4096
"""Block size for reading a file that the disk does not return as a whole."""
_POSITION = Message("", b"position", b"")
"""Topic and key of the frames that hold the position of a segment in the steps topic."""
_REFUSED_SYNC = b"refused\xff"


class Contents(NamedTuple):
    """The contents of a segment.

    position: End of the steps topic when the segment began; None: unknown.
    """

    messages: list[Message]
    unreadable_bytes: int
    position: LogPosition | None


class Damage(NamedTuple):
    """A segment that was moved to `damaged` because parts of it are unreadable.

    readable: Number of its records that can be read.
    """

    path: Path
    readable: int
    unreadable_bytes: int

    @property
    def told(self) -> str:
        """Describe the damage and the remedy in one line for the operator."""
        return (
            f"{self.path}: {self.unreadable_bytes} bytes can't be read, {self.readable} records "
            "can: the disk has lost records, or a crash cut one off; `clawstream spool drain` "
            "sends what can be read, remove the file to give up the rest"
        )


def sync_of(path: Path) -> bytes:
    """Return the sync marker in the name of a segment.

    Raises:
        SpoolFailed: The file name is not a segment name.
    """
    parts = path.stem.split("-")
    with suppress(ValueError, IndexError):
        if len(sync := bytes.fromhex(parts[1])) == SYNC_BYTES:
            return sync
    raise SpoolFailed(
        f"{path} is not named as a segment of a spool: its name holds what is needed to read it"
    )


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


def _position_frames(position: LogPosition, sync: bytes) -> bytes:
    return 2 * frame(_POSITION._replace(value=position.dump()), sync)


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
        for at in range(0, size, READ_BYTES):
            length = min(READ_BYTES, size - at)
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


def damaged_in(directory: Path) -> list[Damage]:
    """List the damaged segments of one gateway's spool. Raises OSError and SpoolFailed."""
    found = [(path, read_segment(path)) for path in sorted((directory / DAMAGED).glob("*.spool"))]
    return [
        Damage(path, len(contents.messages), contents.unreadable_bytes) for path, contents in found
    ]


def put_with_damaged(directory: Path, path: Path) -> Path:
    """Move a segment, unchanged, into `damaged` of its spool, unless it is there already.

    Returns:
        Its path in `damaged`.
    """
    target = directory / DAMAGED / path.name
    if path != target:
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        fsync_path(target.parent)
        fsync_path(path.parent)
    return target


def set_aside(directory: Path, message: Message) -> Path:
    """Append a record that Kafka will never accept to the file `refused`, in the same format.

    The record then does not block the records behind it.

    Returns:
        The path of the file.
    """
    path = directory / REFUSED
    with path.open("ab") as file:
        file.write(frame(message, _REFUSED_SYNC))
        file.flush()
        os.fsync(file.fileno())
    return path


def lock(directory: Path) -> int:
    """Lock a spool directory for this process; create the directory if it is missing.

    Returns:
        The file descriptor that holds the lock until it is closed.

    Raises:
        SpoolTaken: Another process holds the lock.
        SpoolFailed: The directory cannot be created or locked.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            raise
    except BlockingIOError as error:
        raise SpoolTaken(
            f"spool {directory} is in use: give every gateway its own gateway.gateway_id"
        ) from error
    except OSError as error:
        raise SpoolFailed(f"spool {directory}: {error}") from error
    return held


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


class Spool:
    """Records on disk, limited by max_bytes and by the free space of the disk.

    Call `open` before any other method.

    now: Monotonic clock, seconds.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._max_bytes, self._segment_bytes = directory, max_bytes, segment_bytes
        self._now = now
        self.segments: list[Segment] = []
        # File descriptor of the last segment while it is open for appends.
        self._active: int | None = None
        self._lock: int | None = None
        self._sync = os.urandom(SYNC_BYTES)
        self._aside = {HELD: 0, DAMAGED: 0}  # bytes by directory
        # Found by this process in segments that it then moved to `damaged`.
        self.unreadable_bytes = 0
        # Number of the next segment: unique, also among held and damaged segments.
        self._next = 1

    def open(self) -> None:
        """Lock the directory and read the segments of earlier processes.

        Raises:
            SpoolTaken: Another process holds the directory.
            SpoolFailed: The directory cannot be read or written.
        """
        self._lock = lock(self._directory)
        try:
            for name in self._aside:
                (self._directory / name).mkdir(exist_ok=True)
            numbers = [
                int(path.stem.partition("-")[0]) for path in self._directory.rglob("*.spool")
            ]
            found = [self._recover(path) for path in sorted(self._directory.glob("*.spool"))]
        except OSError as error:
            raise SpoolFailed(f"spool {self._directory}: {error}") from error
        self.segments = [segment for segment in found if segment is not None]
        self._next = max(numbers, default=0) + 1
        self._aside = {name: self._count_aside(name) for name in self._aside}

    def _recover(self, path: Path) -> Segment | None:
        size = path.stat().st_size
        if not size:  # the process crashed before it wrote the first record
            path.unlink()
            return None
        found = read_segment(path)
        keys = Counter(m.key for m in found.messages)
        segment = Segment(path, size, keys, found.unreadable_bytes, found.position)
        if found.messages:
            return segment
        if segment.unreadable:
            self._put_with_damaged(segment)
        else:  # it contains only its position
            path.unlink()
        return None

    def frame(self, message: Message) -> bytes:
        """Encode a record as a frame for `append`."""
        return frame(message, self._sync)

    def age_s(self, segment: Segment) -> float | None:
        """Return the seconds since its first record; None: an earlier process wrote that record."""
        return None if segment.began is None else self._now() - segment.began

    def mark_sent(self, segment: Segment, position: LogPosition | None = None) -> None:
        """Mark that some records of a segment may be in Kafka; durable on return.

        Args:
            segment: The segment that is about to be sent.
            position: Current end of the steps topic. A segment gets it if it began before its
                process had reached Kafka for the first time: none of its records was sent before.

        Raises:
            OSError: The write or the rename failed.
        """
        if not segment.maybe_sent:
            if segment.position is None and position is not None:
                self._add_position(segment, position)
            segment.path = segment.path.rename(
                segment.path.with_name(segment.path.stem + "-sent.spool")
            )
            fsync_path(self._directory)

    def _add_position(self, segment: Segment, position: LogPosition) -> None:
        data = _position_frames(position, sync_of(segment.path))
        with segment.path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        segment.position, segment.size = position, segment.size + len(data)

    def hold(self, segment: Segment) -> Path:
        """Move a segment into `held` for `clawstream spool drain`; return its new path."""
        if segment is self.segments[-1]:
            self.seal()
        target = self._directory / HELD / segment.path.name
        segment.path.rename(target)
        fsync_path(target.parent)
        fsync_path(self._directory)
        self.segments.remove(segment)
        self._aside[HELD] += segment.size
        return target

    def _put_with_damaged(self, segment: Segment) -> None:
        path = put_with_damaged(self._directory, segment.path)
        self._aside[DAMAGED] += segment.size
        self.unreadable_bytes += segment.unreadable
        logger().error(
            "spool_damaged",
            kept_in=str(path),
            unreadable_bytes=segment.unreadable,
            records_read=segment.keys.total(),
            action="the disk has lost records, or a crash cut one off: see `clawstream doctor`",
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the segments that are still in `held`: too old to be sent automatically."""
        return self._still_aside(HELD)

    @property
    def damaged_bytes(self) -> int:
        """Bytes of the segments that are still in `damaged`: partly unreadable."""
        return self._still_aside(DAMAGED)

    def _still_aside(self, name: str) -> int:
        if self._aside[name]:  # another process or the operator may have removed segments
            self._aside[name] = self._count_aside(name)
        return self._aside[name]

    def _count_aside(self, name: str) -> int:
        total = 0
        for path in (self._directory / name).glob("*.spool"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    @property
    def size_bytes(self) -> int:
        """Bytes of the segments that wait to be sent."""
        return sum(segment.size for segment in self.segments)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be appended, by max_bytes and by the free space of the disk."""
        try:
            disk = os.statvfs(self._directory)
        except OSError as error:
            logger().error("spool_unusable", directory=str(self._directory), error=str(error))
            return 0
        bound = self._max_bytes - self.size_bytes - self.held_bytes - self.damaged_bytes
        return max(0, min(bound, disk.f_bavail * disk.f_frsize - DISK_RESERVE_BYTES))

    def append(
        self, batch: Sequence[bytes], maybe_sent: bool = False, position: LogPosition | None = None
    ) -> None:
        """Append frames; durable on return. The owner then counts their keys with `count`.

        Args:
            batch: Frames of `frame`.
            maybe_sent: Some of the records may be in Kafka. The segment is marked as sent before
                the frames are in it.
            position: End of the steps topic, if it is known. A new segment stores it.

        Raises:
            SpoolFull: The frames do not fit. None of them is in the spool.
            SpoolFailed: The write failed. None of them is in the spool.
        """
        data = b"".join(batch)
        if len(data) > self.free_bytes:
            raise SpoolFull(
                f"spool {self._directory}: {len(data)} bytes do not fit into {self.free_bytes} "
                "that are left"
            )
        try:
            fd, segment = self._open_active(maybe_sent, position)
            if not segment.size and segment.position is not None:
                data = _position_frames(segment.position, self._sync) + data
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except OSError as error:
            self._cut_off()
            raise SpoolFailed(f"spool {self._directory}: {error}") from error
        segment.size += len(data)

    def _cut_off(self) -> None:
        """Undo an append that failed midway.

        Also removes the segment if that append created it: a segment without records could never
        be drained.
        """
        if self._active is None:
            return
        segment = self.segments[-1]
        with suppress(OSError):
            os.ftruncate(self._active, segment.size)
        self.seal()  # the next record begins a new file, in case the truncation failed
        if not segment.size:
            self.segments.remove(segment)
            with suppress(OSError):
                segment.path.unlink()

    def _open_active(self, maybe_sent: bool, position: LogPosition | None) -> tuple[int, Segment]:
        if self._active is not None and self.segments[-1].size >= self._segment_bytes:
            self.seal()
        if self._active is None:
            name = f"{self._next:012d}-{self._sync.hex()}{'-sent' if maybe_sent else ''}.spool"
            path = self._directory / name
            self._active = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self.segments.append(Segment(path, position=position, began=self._now()))
            self._next += 1
            fsync_path(self._directory)
        elif maybe_sent:
            self.mark_sent(self.segments[-1], position)
        return self._active, self.segments[-1]

    def count(self, keys: Iterable[bytes]) -> None:
        """Count the keys of the records that were just appended."""
        self.segments[-1].keys.update(keys)

    def seal(self) -> None:
        """Close the last segment for appends; the next record goes to a new segment."""
        if self._active is not None:
            os.close(self._active)
            self._active = None

    def first(self) -> tuple[Segment, list[Message]] | None:
        """Return the oldest segment, sealed, and its records in order; None: the spool is empty."""
        if not self.segments:
            return None
        if len(self.segments) == 1:
            self.seal()
        segment = self.segments[0]
        # Unreadable bytes of an fsynced segment mean that the disk lost records already replied to.
        found = read_segment(segment.path)
        missing = max(0, segment.size - segment.path.stat().st_size)
        segment.unreadable = max(segment.unreadable, missing + found.unreadable_bytes)
        return segment, found.messages

    def remove(self, segment: Segment) -> None:
        """Delete a segment whose readable records are acknowledged.

        Moves it into `damaged` instead if parts of it are unreadable.
        """
        if segment.unreadable:
            self._put_with_damaged(segment)
        else:
            segment.path.unlink()
        self.segments.remove(segment)

    def set_aside(self, message: Message) -> Path:
        """Keep a record that Kafka will never accept; see the function `set_aside`."""
        return set_aside(self._directory, message)

    def close(self) -> None:
        """Release the lock of the directory."""
        self.seal()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

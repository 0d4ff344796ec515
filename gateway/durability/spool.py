"""The spool: records that Kafka has not acknowledged, on disk and in order until Kafka returns.

The spool is a directory of append-only segments (`segment`). A record is durable once it is
fsynced; only then may its reply be sent. A segment is deleted when Kafka has acknowledged all of
its records. A crash before the deletion causes a second send, which is harmless: readers drop
duplicates by id. No send position is stored, so none can be wrong.

The age of a segment is measured by the records that the steps topic has received since the position
at its beginning, not by a wall clock.

Damage to a segment loses only the records that it hits. The readable records are sent. Then the
file is not deleted but moved, unchanged, into the directory `damaged`: `clawstream status` lists
it, and `clawstream spool drain` sends the records that are readable by then. A last record that a
crash truncated, and that was never replied to, looks the same and is kept the same way. Segments in
`quarantined` and `damaged` (`quarantine`) count towards the size limit until they are removed.

Blocking and not thread-safe: the owner (`spool_writer`) calls it from one thread at a time.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from clawstream.gateway.durability.log import LogPosition, Message
from clawstream.gateway.durability.quarantine import DAMAGED, QUARANTINED, bytes_in, move_to, reject
from clawstream.gateway.durability.segment import (
    Segment,
    number_of,
    position_frames,
    read_segment,
    segments_in,
    sync_of,
)
from clawstream.gateway.durability.spool_frames import SYNC_BYTES, frame
from clawstream.gateway.errors import SpoolFailed, SpoolFull, SpoolTaken
from clawstream.runtime.atomic_file import fsync_path
from clawstream.runtime.logs import logger
from clawstream.runtime.process.open_files import exhausted

SEGMENT_BYTES = 1 << 20
DISK_RESERVE_BYTES = 1 << 20
"""Disk space that the spool leaves free: a file takes slightly more space than its length."""


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
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
    except BlockingIOError as error:
        raise SpoolTaken(
            f"spool {directory} is in use: give every gateway its own gateway.gateway_id"
        ) from error
    except OSError as error:
        raise SpoolFailed(f"spool {directory}: {error}") from error
    return fd


class Spool:
    """Records on disk, limited by max_bytes and by the free space of the disk.

    Call `open` before any other method.

    now: Monotonic clock, seconds.
    segments: Segments that wait to be sent, oldest first.
    size_bytes: Bytes of these segments.
    quarantined_bytes: Bytes of the segments that are too old to be sent automatically.
    damaged_bytes: Bytes of the segments that are partly unreadable. Both are counted by `count`,
        because others may take these files away.
    unreadable_bytes: Found by this process in segments that it then moved to `damaged`.
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
        self.size_bytes = self.quarantined_bytes = self.damaged_bytes = 0
        self.unreadable_bytes = 0
        # File descriptor of the last segment while it is open for appends.
        self._active: int | None = None
        self._lock: int | None = None
        self._sync = os.urandom(SYNC_BYTES)
        # Number of the next segment: unique, also among quarantined and damaged segments.
        self._next = 1

    def open(self) -> None:
        """Lock the directory and read the segments of earlier processes.

        Raises:
            SpoolTaken: Another process holds the directory.
            SpoolFailed: The directory cannot be read or written.
        """
        self._lock = lock(self._directory)
        try:
            for name in (QUARANTINED, DAMAGED):
                (self._directory / name).mkdir(exist_ok=True)
            self._next = 1 + max(map(number_of, self._directory.rglob("*.spool")), default=0)
            for path in segments_in(self._directory):
                self._recover(path)
        except OSError as error:
            raise SpoolFailed(f"spool {self._directory}: {error}") from error
        self.count()

    def _recover(self, path: Path) -> None:
        messages, unreadable, position = read_segment(path)
        keys = Counter(m.key for m in messages)
        segment = Segment(path, path.stat().st_size, keys, unreadable, position)
        if messages:
            self.segments.append(segment)
            self.size_bytes += segment.size
        else:  # damaged, or the process crashed before it wrote the first record
            self._dispose(segment)

    def close(self) -> None:
        """Release the lock of the directory."""
        self.seal()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- size

    def count(self) -> None:
        """Count the bytes of the segments that wait for the operator, who may remove them."""
        self.quarantined_bytes = bytes_in(self._directory / QUARANTINED)
        self.damaged_bytes = bytes_in(self._directory / DAMAGED)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be appended, by max_bytes and by the free space of the disk."""
        try:
            disk = os.statvfs(self._directory)
        except OSError as error:
            logger().error("spool_unusable", directory=str(self._directory), error=str(error))
            return 0
        bound = self._max_bytes - self.size_bytes - self.quarantined_bytes - self.damaged_bytes
        return max(0, min(bound, disk.f_bavail * disk.f_frsize - DISK_RESERVE_BYTES))

    # -- append

    def append(
        self,
        messages: Sequence[Message],
        maybe_sent: bool = False,
        position: LogPosition | None = None,
    ) -> None:
        """Append records; durable on return.

        Args:
            messages: The records.
            maybe_sent: Some of the records may be in Kafka. The segment is marked as sent before
                the records are in it.
            position: End of the steps topic, if it is known. A new segment stores it.

        Raises:
            SpoolFull: The records do not fit. None of them is in the spool.
            SpoolFailed: The write failed. None of them is in the spool.
        """
        data = b"".join(frame(message, self._sync) for message in messages)
        if len(data) > self.free_bytes:
            raise SpoolFull(
                f"spool {self._directory}: {len(data)} bytes do not fit into {self.free_bytes} "
                "that are left"
            )
        try:
            fd, segment = self._open_active(maybe_sent, position)
            if not segment.size and segment.position is not None:
                data = position_frames(segment.position, self._sync) + data
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except OSError as error:
            self._undo_append()
            cause = exhausted(error) or error
            raise SpoolFailed(f"spool {self._directory}: {cause}") from error
        self._grow(segment, len(data))
        segment.keys.update(message.key for message in messages)

    def _grow(self, segment: Segment, size: int) -> None:
        segment.size += size
        self.size_bytes += size

    def _leave(self, segment: Segment) -> None:
        self.segments.remove(segment)
        self.size_bytes -= segment.size

    def _undo_append(self) -> None:
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

    def seal(self) -> None:
        """Close the last segment for appends; the next record goes to a new segment."""
        if self._active is not None:
            os.close(self._active)
            self._active = None

    # -- drain

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
        if segment.maybe_sent:
            return
        if segment.position is None and position is not None:
            data = position_frames(position, sync_of(segment.path))
            with segment.path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            segment.position = position
            self._grow(segment, len(data))
        segment.path = segment.path.rename(
            segment.path.with_name(segment.path.stem + "-sent.spool")
        )
        fsync_path(self._directory)

    def quarantine(self, segment: Segment) -> Path:
        """Move a segment into `quarantined`; return its new path."""
        if segment is self.segments[-1]:
            self.seal()
        path = move_to(QUARANTINED, self._directory, segment.path)
        self.quarantined_bytes += path.stat().st_size
        self._leave(segment)
        return path

    def remove(self, segment: Segment) -> None:
        """Delete a segment whose readable records are acknowledged.

        Moves it into `damaged` instead if parts of it are unreadable.
        """
        self._dispose(segment)
        self._leave(segment)

    def _dispose(self, segment: Segment) -> None:
        if not segment.unreadable:
            segment.path.unlink()
            return
        path = move_to(DAMAGED, self._directory, segment.path)
        self.damaged_bytes += path.stat().st_size
        self.unreadable_bytes += segment.unreadable
        logger().error(
            "spool_damaged",
            kept_in=str(path),
            unreadable_bytes=segment.unreadable,
            records_read=segment.keys.total(),
            action="the disk has lost records, or a crash truncated one: see `clawstream status`",
        )

    def reject(self, message: Message) -> Path:
        """Keep a record that can never be sent; see the function `quarantine.reject`."""
        return reject(self._directory, message)

"""The spool: records that Kafka did not acknowledge, on disk, in order, until it is back.

A directory of append-only segments `<number>-<sync marker>.spool`, with `-sent` behind the marker once any of its records may have reached
Kafka, by whatever way. How a record lies in them is `spool_frames`' business. A record counts once it is fsynced, and only then may its
reply be sent. A segment is removed when all of it is acknowledged, so a crash in between sends it again: ids make that harmless, and
there is no stored position that could be wrong.

A segment begins with the position at which the log of steps ended when its first record came, as far as that was known: how old it is
is judged by what has come to the log since, not by a clock. It lies there twice, each in a frame of its own.

What can't be read of a segment costs the records that it hits. Those that can be read are sent; then the file is not removed but moved,
as it is, into the directory `damaged`, where `clawstream doctor` names it and `clawstream spool drain` sends what can be read by then. The
end of a record that a crash cut off, and that was never replied to, looks the same and is kept the same way.

What is too old to be sent by itself (`journal` says why) is moved into the directory `held`, where `clawstream spool drain` finds it
while the gateway runs. Both count within the bound until they are gone.

Not thread-safe and blocking: its owner (`journal`) calls it from one thread at a time.
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
"""Left free on the disk: what is written there takes a little more than its length."""
HELD, DAMAGED, REFUSED = "held", "damaged", "refused"
READ_BYTES = 4096
"""Read at once where the disk does not give a whole file back."""
_POSITION = Message("", b"position", b"")
"""Topic and key of the frames that hold a segment's position on the log."""
_REFUSED_SYNC = b"refused\xff"


class Contents(NamedTuple):
    """What is in a segment. position: where the log of steps ended when it began; None: not known."""

    messages: list[Message]
    unreadable_bytes: int
    position: LogPosition | None


class Damage(NamedTuple):
    """A segment that was put aside because some of it can't be read. readable: records of it that can."""

    path: Path
    readable: int
    unreadable_bytes: int

    @property
    def told(self) -> str:
        """A line for a person."""
        return (
            f"{self.path}: {self.unreadable_bytes} bytes can't be read, {self.readable} records can: the disk has lost records, or "
            "a crash cut one off; `clawstream spool drain` sends what can be read, remove the file to give up the rest"
        )


def sync_of(path: Path) -> bytes:
    """The marker of a segment, which its name says. Raises SpoolFailed when it is no name of a segment."""
    parts = path.stem.split("-")
    with suppress(ValueError, IndexError):
        if len(sync := bytes.fromhex(parts[1])) == SYNC_BYTES:
            return sync
    raise SpoolFailed(
        f"{path} is not named as a segment of a spool: its name holds what is needed to read it"
    )


def read_segment(path: Path) -> Contents:
    """What can be read of a segment, and how much can't. Raises OSError and SpoolFailed."""
    found = scan(_bytes_of(path), sync_of(path))
    positions = [LogPosition.load(m.value) for m in found.messages if m.topic == _POSITION.topic]
    messages = [m for m in found.messages if m.topic != _POSITION.topic]
    return Contents(messages, found.unreadable_bytes, positions[0] if positions else None)


def _position_frames(position: LogPosition, sync: bytes) -> bytes:
    return 2 * frame(_POSITION._replace(value=position.dump()), sync)


def _bytes_of(path: Path) -> bytes:
    """A file; zeros where the disk does not give it back."""
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
    """The damaged segments of one gateway's spool. Raises OSError and SpoolFailed."""
    found = [(path, read_segment(path)) for path in sorted((directory / DAMAGED).glob("*.spool"))]
    return [
        Damage(path, len(contents.messages), contents.unreadable_bytes) for path, contents in found
    ]


def put_with_damaged(directory: Path, path: Path) -> Path:
    """Move a segment, as it is, to the damaged ones of its spool, unless it is there; gives where it lies now."""
    target = directory / DAMAGED / path.name
    if path != target:
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        fsync_path(target.parent)
        fsync_path(path.parent)
    return target


def set_aside(directory: Path, message: Message) -> Path:
    """Keep a record that Kafka will never take in `refused`, in the same format, so that it does not stop the others."""
    path = directory / REFUSED
    with path.open("ab") as file:
        file.write(frame(message, _REFUSED_SYNC))
        file.flush()
        os.fsync(file.fileno())
    return path


def lock(directory: Path) -> int:
    """Take a spool directory, made if need be: a file descriptor that holds it. Raises SpoolTaken or SpoolFailed."""
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
    """One file of the spool. keys: how many records of each key it holds. unreadable: bytes of it, when it was last read.

    position: where the log of steps ended when it began; None: not known. began: when that was, by the clock of `Spool`; None: an earlier
    process made it.
    """

    path: Path
    size: int = 0
    keys: Counter[bytes] = field(default_factory=Counter)
    unreadable: int = 0
    position: LogPosition | None = None
    began: float | None = None

    @property
    def maybe_sent(self) -> bool:
        """Whether any of its records may be on Kafka already."""
        return self.path.stem.endswith("-sent")


class Spool:
    """Bounded by max_bytes and by the free space of the disk. `open` before anything else. now: a monotonic clock, seconds."""

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
        self._active: int | None = (
            None  # file descriptor of the last segment while it takes records
        )
        self._lock: int | None = None
        self._sync = os.urandom(SYNC_BYTES)
        self._aside = {HELD: 0, DAMAGED: 0}  # bytes put aside
        self.unreadable_bytes = 0  # found by this process, in segments that it then put aside
        self._next = 1  # number of the next segment: never one that a segment has, held ones too

    def open(self) -> None:
        """Take the directory and read what an earlier process left. Raises SpoolTaken or SpoolFailed."""
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
        if not size:  # a crash came before the first record
            path.unlink()
            return None
        found = read_segment(path)
        keys = Counter(m.key for m in found.messages)
        segment = Segment(path, size, keys, found.unreadable_bytes, found.position)
        if found.messages:
            return segment
        if segment.unreadable:
            self._put_with_damaged(segment)
        else:  # its position is all there is
            path.unlink()
        return None

    def frame(self, message: Message) -> bytes:
        """A record as this process writes it: for `append`."""
        return frame(message, self._sync)

    def age_s(self, segment: Segment) -> float | None:
        """Seconds since its first record; None: it came to an earlier process."""
        return None if segment.began is None else self._now() - segment.began

    def mark_sent(self, segment: Segment, position: LogPosition | None = None) -> None:
        """From now on some of its records may be on Kafka; durable when this returns. Raises OSError.

        position: where the log of steps ends now. A segment that began before its process had ever seen Kafka gets it: nothing of it was
        sent before.
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
        """Put a segment aside for `clawstream spool drain`; gives where it lies now."""
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
            "spool_damaged", kept_in=str(path), unreadable_bytes=segment.unreadable, records_read=segment.keys.total(),
            action="the disk has lost records, or a crash cut one off: see `clawstream doctor`",
        )  # fmt: skip

    @property
    def held_bytes(self) -> int:
        """Bytes that were too old to be sent, and are still there."""
        return self._still_aside(HELD)

    @property
    def damaged_bytes(self) -> int:
        """Bytes of segments of which some can't be read, and that are still there."""
        return self._still_aside(DAMAGED)

    def _still_aside(self, name: str) -> int:
        if self._aside[name]:  # another process, or a person, takes them away
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
        """Bytes on disk that wait."""
        return sum(segment.size for segment in self.segments)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be appended: by the bound, and by the disk."""
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
        """Frames onto disk: durable when this returns. Raises SpoolFull or SpoolFailed; then none of them is in the spool.

        maybe_sent: some of them may be on Kafka; their segment says so before they are in it. position: where the log of steps ends, as far
        as that is known: a new segment keeps it. The keys are counted by `count`, for the owner knows them.
        """
        data = b"".join(batch)
        if len(data) > self.free_bytes:
            raise SpoolFull(
                f"spool {self._directory}: {len(data)} bytes do not fit into {self.free_bytes} that are left"
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
        """Undo an append that failed midway. A segment that it made goes too: one without records could never be drained."""
        if self._active is None:
            return
        segment = self.segments[-1]
        with suppress(OSError):
            os.ftruncate(self._active, segment.size)
        self.seal()  # whatever was written of it, the next record begins a file of its own
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
        """Note the keys of what was just appended."""
        self.segments[-1].keys.update(keys)

    def seal(self) -> None:
        """The last segment takes no more records: the next go to a new one."""
        if self._active is not None:
            os.close(self._active)
            self._active = None

    def first(self) -> tuple[Segment, list[Message]] | None:
        """The oldest segment, sealed, and its records in order; None when the spool is empty."""
        if not self.segments:
            return None
        if len(self.segments) == 1:
            self.seal()
        segment = self.segments[0]
        # Fsynced, and perhaps not readable any more: then the disk has lost what was replied to.
        found = read_segment(segment.path)
        missing = max(0, segment.size - segment.path.stat().st_size)
        segment.unreadable = max(segment.unreadable, missing + found.unreadable_bytes)
        return segment, found.messages

    def remove(self, segment: Segment) -> None:
        """All of it that can be read is acknowledged: it goes, or to the damaged ones when something can't be read."""
        if segment.unreadable:
            self._put_with_damaged(segment)
        else:
            segment.path.unlink()
        self.segments.remove(segment)

    def set_aside(self, message: Message) -> Path:
        """A record that Kafka will never take: see `set_aside`."""
        return set_aside(self._directory, message)

    def close(self) -> None:
        """Give the directory back."""
        self.seal()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

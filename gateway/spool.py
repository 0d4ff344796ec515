"""The spool: records that Kafka did not acknowledge, on disk, in order, until it is back.

A directory of append-only segments `<number>-<unix seconds of its first record>.spool`, with `-sent` behind the seconds once any of
its records may have reached Kafka, by whatever way. A frame is: length of the payload (uint32 LE), crc32 of the payload (uint32
LE), payload = length of topic and of key (2 x uint16 LE), topic, key, value. A frame counts once it is fsynced, and only then may
its reply be sent. A segment is removed when all of it is acknowledged, so a crash in between sends it again: ids make that
harmless, and there is no stored position that could be wrong. What follows the last whole frame of a segment was never replied
to; it is cut off at the next start and kept beside it as `<name>.torn`.

What is too old to be sent by itself (`journal` says why) is moved into the directory `held`, where `clawstream spool drain` finds it
while the gateway runs. It counts within the bound until it is gone.

Not thread-safe and blocking: its owner (`journal`) calls it from one thread at a time.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gateway.bus import Message
from gateway.errors import SpoolFailed, SpoolFull, SpoolTaken
from runtime.durable_file import fsync_path
from runtime.telemetry import logger

SEGMENT_BYTES = 1 << 20
DISK_RESERVE_BYTES = 1 << 20
"""Left free on the disk: what is written there takes a little more than its length."""
HELD = "held"
_FRAME = struct.Struct("<II")
_NAMES = struct.Struct("<HH")


def frame(message: Message) -> bytes:
    """One record as it lies in a segment."""
    topic = message.topic.encode()
    payload = _NAMES.pack(len(topic), len(message.key)) + topic + message.key + message.value
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def frames(data: bytes) -> Iterator[tuple[Message, int]]:
    """The whole frames at the beginning of `data`, each with the offset of its end. Stops at the first that is not whole."""
    at = 0
    while at + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < max(length, _NAMES.size) or zlib.crc32(payload) != crc:
            return
        topic_length, key_length = _NAMES.unpack_from(payload)
        topic_end = _NAMES.size + topic_length
        key_end = topic_end + key_length
        at += _FRAME.size + length
        yield Message(payload[_NAMES.size : topic_end].decode(), payload[topic_end:key_end], payload[key_end:]), at


def read_segment(path: Path) -> tuple[list[Message], int]:
    """The records of a segment and the bytes they take; what follows the last whole one is moved beside it."""
    data = path.read_bytes()
    found = list(frames(data))
    end = found[-1][1] if found else 0
    if end < len(data):
        torn = path.with_suffix(".torn")
        with torn.open("ab") as file:
            file.write(data[end:])
        os.truncate(path, end)
        logger().error("spool_torn", kept_in=str(torn), bytes=len(data) - end)
    return [message for message, _ in found], end


def set_aside(directory: Path, message: Message) -> Path:
    """Keep a record that Kafka will never take in `refused`, in the same format, so that it does not stop the others."""
    path = directory / "refused"
    with path.open("ab") as file:
        file.write(frame(message))
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
        raise SpoolTaken(f"spool {directory} is in use: give every gateway its own gateway.gateway_id") from error
    except OSError as error:
        raise SpoolFailed(f"spool {directory}: {error}") from error
    return held


@dataclass(slots=True)
class Segment:
    """One file of the spool. keys: how many records of each key it holds."""

    path: Path
    size: int = 0
    keys: Counter[bytes] = field(default_factory=Counter)

    @property
    def since(self) -> float:
        """When its first record came, unix seconds."""
        return float(self.path.stem.split("-")[1])

    @property
    def maybe_sent(self) -> bool:
        """Whether any of its records may be on Kafka already."""
        return self.path.stem.endswith("-sent")


class Spool:
    """Bounded by max_bytes and by the free space of the disk. `open` before anything else. now: unix seconds."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._max_bytes, self._segment_bytes, self._now = directory, max_bytes, segment_bytes, now
        self.segments: list[Segment] = []
        self._active: int | None = None  # file descriptor of the last segment while it takes records
        self._lock: int | None = None
        self._held_bytes = 0
        self._next = 1  # number of the next segment: never one that a segment has, held ones too

    def open(self) -> None:
        """Take the directory and read what an earlier process left. Raises SpoolTaken or SpoolFailed."""
        self._lock = lock(self._directory)
        try:
            (self._directory / HELD).mkdir(exist_ok=True)
            numbers = [int(path.stem.partition("-")[0]) for path in self._directory.rglob("*.spool")]
            found = [self._recover(path) for path in sorted(self._directory.glob("*.spool"))]
        except OSError as error:
            raise SpoolFailed(f"spool {self._directory}: {error}") from error
        self.segments = [segment for segment in found if segment is not None]
        self._next = max(numbers, default=0) + 1
        self._held_bytes = self._count_held()

    def _recover(self, path: Path) -> Segment | None:
        messages, end = read_segment(path)
        if not messages:
            path.unlink()
            return None
        return Segment(path, end, Counter(m.key for m in messages))

    def age_s(self, segment: Segment) -> float:
        """Seconds since its first record."""
        return self._now() - segment.since

    def mark_sent(self, segment: Segment) -> None:
        """From now on some of its records may be on Kafka; durable when this returns. Raises OSError."""
        if not segment.maybe_sent:
            segment.path = segment.path.rename(segment.path.with_name(segment.path.stem + "-sent.spool"))
            fsync_path(self._directory)

    def hold(self, segment: Segment) -> Path:
        """Put a segment aside for `clawstream spool drain`; gives where it lies now."""
        if segment is self.segments[-1]:
            self.seal()
        target = self._directory / HELD / segment.path.name
        segment.path.rename(target)
        fsync_path(target.parent)
        fsync_path(self._directory)
        self.segments.remove(segment)
        self._held_bytes += segment.size
        return target

    @property
    def held_bytes(self) -> int:
        """Bytes put aside that are still there."""
        if self._held_bytes:  # another process takes them away
            self._held_bytes = self._count_held()
        return self._held_bytes

    def _count_held(self) -> int:
        total = 0
        for path in (self._directory / HELD).glob("*.spool"):
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
        bound = self._max_bytes - self.size_bytes - self.held_bytes
        return max(0, min(bound, disk.f_bavail * disk.f_frsize - DISK_RESERVE_BYTES))

    def append(self, batch: Sequence[bytes], maybe_sent: bool = False) -> None:
        """Frames onto disk: durable when this returns. Raises SpoolFull or SpoolFailed; then none of them is in the spool.

        maybe_sent: some of them may be on Kafka; their segment says so before they are in it. The keys are counted by `count`, for
        the owner knows them.
        """
        data = b"".join(batch)
        if len(data) > self.free_bytes:
            raise SpoolFull(
                f"spool {self._directory}: {len(data)} bytes do not fit into {self.free_bytes} that are left"
            )
        try:
            fd, segment = self._open_active(maybe_sent)
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
        self.seal()  # a torn frame that could not be cut off would hide all that follow it in this file
        if not segment.size:
            self.segments.remove(segment)
            with suppress(OSError):
                segment.path.unlink()

    def _open_active(self, maybe_sent: bool) -> tuple[int, Segment]:
        if self._active is not None and self.segments[-1].size >= self._segment_bytes:
            self.seal()
        if self._active is None:
            path = self._directory / f"{self._next:012d}-{int(self._now())}{'-sent' if maybe_sent else ''}.spool"
            self._active = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self.segments.append(Segment(path))
            self._next += 1
            fsync_path(self._directory)
        elif maybe_sent:
            self.mark_sent(self.segments[-1])
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
        # Fsynced, and perhaps not readable any more: then the disk has lost what was replied to, which is said and kept.
        messages, segment.size = read_segment(segment.path)
        return segment, messages

    def remove(self, segment: Segment) -> None:
        """All of it is acknowledged."""
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

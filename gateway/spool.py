"""The spool: records that Kafka did not acknowledge, on disk, in order, until it is back.

A directory of append-only segments `<number>.spool`. A frame is: length of the payload (uint32 LE), crc32 of the payload (uint32
LE), payload = length of topic and of key (2 x uint16 LE), topic, key, value. A frame counts once it is fsynced, and only then may
its reply be sent. A segment is removed when all of it is acknowledged, so a crash in between sends it again: ids make that
harmless, and there is no stored position that could be wrong. What follows the last whole frame of a segment was never replied
to; it is cut off at the next start and kept beside it as `<number>.torn`.

Not thread-safe and blocking: its owner (`journal`) calls it from one thread at a time.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gateway.bus import Message
from gateway.errors import SpoolFailed, SpoolFull, SpoolTaken
from runtime.telemetry import logger

SEGMENT_BYTES = 1 << 20
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


def _cut_off(path: Path, data: bytes, end: int) -> None:
    """Move what follows the last whole frame of a segment beside it."""
    torn = path.with_suffix(".torn")
    with torn.open("ab") as file:
        file.write(data[end:])
    os.truncate(path, end)
    logger().error("spool_torn", kept_in=str(torn), bytes=len(data) - end)


@dataclass(slots=True)
class Segment:
    """One file of the spool. keys: how many records of each key it holds."""

    path: Path
    size: int = 0
    keys: Counter[bytes] = field(default_factory=Counter)


class Spool:
    """Bounded by max_bytes on disk. `open` before anything else."""

    def __init__(self, directory: Path, max_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory, self._max_bytes, self._segment_bytes = directory, max_bytes, segment_bytes
        self.segments: list[Segment] = []
        self._active: int | None = None  # file descriptor of the last segment while it takes records
        self._lock: int | None = None

    def open(self) -> None:
        """Take the directory and read what an earlier process left. Raises SpoolTaken or SpoolFailed."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SpoolTaken(
                f"spool {self._directory} is in use: give every gateway its own gateway.gateway_id"
            ) from error
        except OSError as error:
            raise SpoolFailed(f"spool {self._directory}: {error}") from error
        self.segments = [
            s for path in sorted(self._directory.glob("*.spool")) if (s := self._recover(path)) is not None
        ]

    def _recover(self, path: Path) -> Segment | None:
        data, end = path.read_bytes(), 0
        segment = Segment(path)
        for message, end in frames(data):  # noqa: B007 - the last end is used below
            segment.keys[message.key] += 1
        if end < len(data):
            _cut_off(path, data, end)
        if end == 0:
            path.unlink()
            return None
        segment.size = end
        return segment

    @property
    def size_bytes(self) -> int:
        """Bytes on disk that wait."""
        return sum(segment.size for segment in self.segments)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be appended."""
        return self._max_bytes - self.size_bytes

    def append(self, batch: Sequence[bytes]) -> None:
        """Frames onto disk: durable when this returns. Raises SpoolFull or SpoolFailed; then none of them is in the spool.

        The keys are counted by `count`, for the owner knows them.
        """
        data = b"".join(batch)
        if len(data) > self.free_bytes:
            raise SpoolFull(
                f"spool {self._directory}: {len(data)} bytes do not fit into {self.free_bytes} that are left"
            )
        try:
            fd, segment = self._open_active()
        except OSError as error:
            raise SpoolFailed(f"spool {self._directory}: {error}") from error
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(fd, segment.size)
            self.seal()  # a torn frame that could not be cut off would hide all that follow it in this file
            raise SpoolFailed(f"spool {segment.path}: {error}") from error
        segment.size += len(data)

    def _open_active(self) -> tuple[int, Segment]:
        if self._active is not None and self.segments[-1].size >= self._segment_bytes:
            self.seal()
        if self._active is None:
            number = int(self.segments[-1].path.stem) + 1 if self.segments else 1
            path = self._directory / f"{number:012d}.spool"
            self._active = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self.segments.append(Segment(path))
            directory = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
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
        data = segment.path.read_bytes()
        found = list(frames(data))
        end = found[-1][1] if found else 0
        if end < segment.size:  # fsynced, and yet not readable any more: the disk has lost what was replied to
            _cut_off(segment.path, data, end)
            segment.size = end
        return segment, [message for message, _ in found]

    def remove(self, segment: Segment) -> None:
        """All of it is acknowledged."""
        segment.path.unlink()
        self.segments.remove(segment)

    def set_aside(self, message: Message) -> Path:
        """A record that Kafka will never take: kept in `refused` in the same format, so that it does not stop the others."""
        path = self._directory / "refused"
        with path.open("ab") as file:
            file.write(frame(message))
            file.flush()
            os.fsync(file.fileno())
        return path

    def close(self) -> None:
        """Give the directory back."""
        self.seal()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

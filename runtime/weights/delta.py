"""Deltas: the positions and values in which the tensors of a version differ from another version.

The bits of a tensor are compared as unsigned integers of the element size, so the result equals the
new version bit for bit: any dtype, negative zeros and NaN payloads included. A changed tensor has
one payload, compressed with zstd:

1. the gaps between changed positions: one byte for each, 255 means "255, and more follows";
2. the differences of the bits, in zigzag code (0, -1, 1, -2, ...), all first bytes, then all second
   ones and so on. An optimizer step changes a value by few units in the last place, so all bytes
   but the first are nearly always zero.

A delta file has all payloads, then an index, and ends with the SHA-256 of the index, its length and
MAGIC. The index has the digests of the files before and after, and of each payload and its result.
"""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import cramjam
import msgspec
import numpy as np

from clawstream.runtime.digests import SHA256
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.weights.tensor_file import TensorSlice, read_header

MAGIC = b"CLAWDLT1"
LEVEL = 3
"""Of zstd. Higher levels cost many times the CPU and save a few percent."""
_MORE = 255
_CHUNK = 1 << 20
"""Elements that are encoded or decoded at once, so that temporary arrays stay small."""
_TRAILER_BYTES = 32 + 8 + len(MAGIC)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[Any]]
Digest = Annotated[str, msgspec.Meta(pattern=SHA256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed tensor.

    Attributes:
        file, name: of the tensor.
        begin, end: of its payload in the delta file, bytes.
        sha256: of the payload.
        changed: number of changed elements.
        result_sha256: of the tensor's bytes in the new version.
    """

    file: str
    name: str
    begin: int
    end: int
    sha256: str
    changed: int
    result_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The index of a delta. base, result: SHA-256 of each tensor file before and after, by name."""

    base: dict[str, Digest]
    result: dict[str, Digest]
    changes: list[Change]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensor files of a version: content and SHA-256 by file name."""

    content: Mapping[str, mmap.mmap]
    digests: Mapping[str, str]


def mapped(directory: Path) -> dict[str, mmap.mmap]:
    """Map the tensor files of a directory into memory.

    Renamed or deleted files stay readable, and cost disk space but no memory.
    """
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            found[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return found


def write_delta(base: Snapshot, new: Mapping[str, mmap.mmap], target: BinaryIO) -> Snapshot | None:
    """Write the delta from one version to another.

    Args:
        base: the version that readers have.
        new: the tensor files of the new version, by name.
        target: an empty file.

    Returns:
        The new version; None if a delta can't be written or doesn't pay, because files, names,
        dtypes or shapes are others, or the delta exceeds half of the files.
    """
    changes, limit = list[Change](), sum(map(len, new.values())) // 2
    if base.content.keys() != new.keys():
        return None
    for file, content in new.items():
        before = base.content[file]
        header, tensors = _header(content)
        if len(before) != len(content) or _header(before)[0] != header:
            return None
        for tensor in tensors:
            change = _write_change(file, tensor, before, content, target)
            if change is not None:
                changes.append(change)
            if target.tell() > limit:
                return None
    digests = {file: _sha256(content) for file, content in new.items()}
    index = msgspec.json.encode(Index(base=dict(base.digests), result=digests, changes=changes))
    target.write(index + hashlib.sha256(index).digest() + len(index).to_bytes(8, "little") + MAGIC)
    return Snapshot(new, digests)


def _header(content: mmap.mmap) -> tuple[bytes, list[TensorSlice]]:
    content.seek(0)
    return read_header(content)


def _write_change(
    file: str, tensor: TensorSlice, before: mmap.mmap, after: mmap.mmap, target: BinaryIO
) -> Change | None:
    """Write the payload of a tensor; return None if the tensor is unchanged."""
    old, new = (_numbers(content, tensor, tensor.begin) for content in (before, after))
    changed, payload = encode(old, new)
    if not changed:
        return None
    begin = target.tell()
    target.write(payload)
    return Change(
        file=file,
        name=tensor.name,
        begin=begin,
        end=target.tell(),
        sha256=_sha256(payload),
        changed=changed,
        result_sha256=_sha256(new.data),
    )


class DeltaFile:
    """A delta file. Its index is read and checked at once, its payloads when they are needed."""

    def __init__(self, path: Path) -> None:
        """Raises WeightsUnreadable: the file is no delta, or is damaged."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.index = _read_index(file)
        except (OSError, ValueError) as error:
            raise WeightsUnreadable(f"{path}: {error}") from error
        if self.index.base.keys() != self.index.result.keys():
            raise WeightsUnreadable(f"{path}: its base and its result have different files")
        self._changes = {(change.file, change.name): change for change in self.index.changes}

    def change(self, file: str, tensor: str) -> Change | None:
        """Return the change of a tensor; None: it stays."""
        return self._changes.get((file, tensor))

    def apply(self, change: Change, data: Numbers) -> None:
        """Change the elements of a tensor in place.

        Args:
            change: of this delta.
            data: the tensor's bits as unsigned integers.

        Raises:
            WeightsUnreadable: the payload is damaged.
        """
        with self.path.open("rb") as file:
            file.seek(change.begin)
            payload = file.read(change.end - change.begin)
        if _sha256(payload) != change.sha256:
            raise WeightsUnreadable(f"{self.path}: the payload of {change.name} is damaged")
        try:
            decode(payload, change.changed, data)
        except (ValueError, IndexError, cramjam.DecompressionError) as error:
            raise WeightsUnreadable(f"{self.path}: {change.name}: {error}") from error


def rebuild(file: str, base: Path, deltas: Sequence[DeltaFile], target: BinaryIO) -> None:
    """Write a tensor file: that of the base with all deltas applied.

    One tensor, and the changes of one delta to it, are in memory.

    Args:
        file: its name.
        base: the file before the first delta.
        deltas: at least one; each is against the result of the one before.
        target: an empty file. Use it only if this function returns.

    Raises:
        WeightsUnreadable: the result has another SHA-256 than the last delta says, because a delta
            or the base is damaged.
        OSError: a file can't be read or written.
    """
    written = hashlib.sha256()
    with base.open("rb") as source:
        try:
            header, tensors = read_header(source)
        except ValueError as error:
            raise WeightsUnreadable(f"{base}: {error}") from error
        written.update(header)
        target.write(header)
        for tensor in tensors:
            data = bytearray(source.read(tensor.size_bytes))
            if len(data) < tensor.size_bytes:
                raise WeightsUnreadable(f"{base}: it ends within {tensor.name}")
            _apply(file, tensor, deltas, data)
            written.update(data)
            target.write(data)
    if written.hexdigest() != deltas[-1].index.result.get(file):
        raise WeightsUnreadable(f"{deltas[-1].path} gives {file} another sha256 than it says")


def _apply(file: str, tensor: TensorSlice, deltas: Sequence[DeltaFile], data: bytearray) -> None:
    last = None
    for delta in deltas:
        if (change := delta.change(file, tensor.name)) is not None:
            delta.apply(change, _numbers(data, tensor, 0))
            last = delta, change
    if last is not None and _sha256(data) != last[1].result_sha256:
        raise WeightsUnreadable(f"{last[0].path} gives {tensor.name} another sha256 than it says")


def encode(old: Numbers, new: Numbers) -> tuple[int, bytes]:
    """Encode the differences of two arrays of unsigned integers of one type and length.

    Returns:
        Number of changed elements, and their gaps and differences, compressed.
    """
    gaps, steps, last = list[Bytes](), list[Numbers](), -1
    for start in range(0, len(new), _CHUNK):
        before, now = old[start : start + _CHUNK], new[start : start + _CHUNK]
        at = np.flatnonzero(before != now)
        if at.size:
            gaps.append(_gap_bytes(np.diff(at + start, prepend=last) - 1))
            steps.append(_zigzag(now[at] - before[at]))
            last = int(at[-1]) + start
    if not steps:
        return 0, b""
    step = np.concatenate(steps)
    planes = step.view(np.uint8).reshape(-1, step.itemsize).T  # little-endian, as safetensors is
    body = np.concatenate([*gaps, np.ascontiguousarray(planes).ravel()])
    return step.size, bytes(cramjam.zstd.compress(memoryview(body), level=LEVEL))


def decode(payload: bytes, changed: int, data: Numbers) -> None:
    """Apply the payload of `encode` to the old array in place.

    Args:
        payload: from `encode`.
        changed: number of changed elements.
        data: the old array.

    Raises:
        ValueError, IndexError, cramjam.DecompressionError: the payload is not one for this array.
    """
    body = np.asarray(cramjam.zstd.decompress(payload), np.uint8)
    gaps = body[: body.size - changed * data.itemsize]
    planes = body[gaps.size :].reshape(data.itemsize, changed)
    done = skipped = 0  # changed elements before this chunk, and unchanged ones
    for start in range(0, gaps.size, _CHUNK):
        part = gaps[start : start + _CHUNK]
        ends = np.flatnonzero(part != _MORE)
        sums = skipped + np.cumsum(part, dtype=np.int64)
        steps = np.ascontiguousarray(planes[:, done : done + ends.size].T).view(data.dtype).ravel()
        data[sums[ends] + np.arange(done, done + ends.size)] += _unzigzag(steps)
        done, skipped = done + ends.size, int(sums[-1])
    if done != changed:
        raise ValueError(f"{done} changed elements, not {changed}")


def _gap_bytes(gaps: np.ndarray[Any, np.dtype[np.int64]]) -> Bytes:
    """Return the gaps in bytes: each 255 for 255, then the rest, which is below 255."""
    more = gaps // _MORE
    body = np.full(gaps.size + int(more.sum()), _MORE, np.uint8)
    body[np.cumsum(more + 1) - 1] = gaps % _MORE
    return body


def _zigzag(numbers: Numbers) -> Numbers:
    """Map two's complement numbers to 0, 1, 2, ... in the order 0, -1, 1, -2, ..."""
    sign = numbers >> (8 * numbers.itemsize - 1)
    return (numbers << 1) ^ (0 - sign)


def _unzigzag(numbers: Numbers) -> Numbers:
    return (numbers >> 1) ^ (0 - (numbers & 1))


def _numbers(data: mmap.mmap | bytearray, tensor: TensorSlice, begin: int) -> Numbers:
    """View the bytes of a tensor as unsigned integers of its element size."""
    width = tensor.item_bytes if tensor.item_bytes in (1, 2, 4, 8) else 1
    return np.frombuffer(data, f"<u{width}", tensor.size_bytes // width, begin)


def _read_index(file: BinaryIO) -> Index:
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - _TRAILER_BYTES))
    trailer = file.read()
    length = int.from_bytes(trailer[32:40], "little")
    if trailer[40:] != MAGIC or length > end - _TRAILER_BYTES:
        raise ValueError("not a whole delta file")
    file.seek(end - _TRAILER_BYTES - length)
    index = file.read(length)
    if hashlib.sha256(index).digest() != trailer[:32]:
        raise ValueError("the index is damaged")
    return msgspec.json.decode(index, type=Index)


def _sha256(data: bytes | bytearray | memoryview | mmap.mmap) -> str:
    return hashlib.sha256(data).hexdigest()

"""The layout of a safetensors file (https://github.com/huggingface/safetensors, section Format).

Eight bytes with the length of the header, the header in JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


class Readable(Protocol):
    """A file, or a memory map."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor of a file.

    Attributes:
        dtype: in safetensors spelling.
        begin, end: bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    @property
    def item_bytes(self) -> int:
        """Size of an element in bytes; 1 where elements are smaller, or there are none."""
        elements = math.prod(self.shape)
        return max(1, self.size_bytes // elements) if elements else 1


def read_header(file: Readable) -> tuple[bytes, list[TensorSlice]]:
    """Read the header of a file, from its start to the first tensor.

    Returns:
        The bytes read, and the tensors in the order of their bytes.

    Raises:
        ValueError: the header is malformed, or the tensors have gaps or overlap.
    """
    length = file.read(LENGTH_BYTES)
    size = int.from_bytes(length, "little")
    if len(length) < LENGTH_BYTES or size > _MAX_HEADER_BYTES:
        raise ValueError("deserializing the header: not a safetensors file")
    header = file.read(size)
    if len(header) < size:
        raise ValueError(f"deserializing the header: {len(header)} of its {size} bytes are there")
    return length + header, _slices(header)


def _slices(header: bytes) -> list[TensorSlice]:
    start, found = LENGTH_BYTES + len(header), list[TensorSlice]()
    try:
        tensors: Mapping[str, Any] = json.loads(header)
        for name, fields in tensors.items():
            if name != "__metadata__":
                begin, end = fields["data_offsets"]
                shape = tuple(map(int, fields["shape"]))
                found.append(TensorSlice(name, fields["dtype"], shape, start + begin, start + end))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"deserializing the header: {error!r}") from error
    found.sort(key=lambda t: (t.begin, t.end))
    at = start
    for tensor in found:
        if tensor.begin != at or tensor.end < at:
            raise ValueError(f"deserializing the header: {tensor.name} begins at a wrong offset")
        at = tensor.end
    return found


def with_sorted_header(content: bytes) -> bytes:
    """Return a safetensors file with the keys of its header sorted.

    The safetensors library writes those of the metadata in an order that differs between processes.
    """
    begin = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    fields = json.loads(content[LENGTH_BYTES:begin])
    header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)  # the tensors stay aligned
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + content[begin:]

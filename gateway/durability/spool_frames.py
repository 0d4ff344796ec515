"""The format of a record in a spool segment, and reading records from a damaged segment. Pure.

A frame is a header and a payload. The header is the sync marker of the segment (8 random bytes),
the length of the payload (uint32 LE), the CRC-32 of the payload (uint32 LE) and the CRC-32 of these
three fields (uint32 LE). The payload is the length of the topic and of the key (2 x uint16 LE),
then topic, key and value.

Where a frame is expected but not found, the reader continues at the next marker that starts a valid
frame. Damage therefore loses only the records that it hits. The marker is random for the same
reason as in an Avro file: a client chooses the contents of its records. It must not be able to
embed a frame that the reader accepts when the frame around it is damaged.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from clawstream.gateway.durability.log import Message

SYNC_BYTES = 8
_HEAD = struct.Struct(f"<{SYNC_BYTES}sII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEAD.size + _CRC.size
_NAMES = struct.Struct("<HH")


class Scan(NamedTuple):
    """The contents of a segment.

    messages: Its records in order.
    unreadable: Byte ranges [start, end) that belong to no valid frame.
    """

    messages: list[Message]
    unreadable: list[tuple[int, int]]

    @property
    def unreadable_bytes(self) -> int:
        """Number of bytes that belong to no valid frame."""
        return sum(end - start for start, end in self.unreadable)


def frame(message: Message, sync: bytes) -> bytes:
    """Encode one record. sync: The marker of the segment."""
    topic = message.topic.encode()
    payload = _NAMES.pack(len(topic), len(message.key)) + topic + message.key + message.value
    head = _HEAD.pack(sync, len(payload), zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


def frame_bytes(message: Message) -> int:
    """Return the length of the frame of a record."""
    names = _NAMES.size + len(message.topic.encode()) + len(message.key)
    return HEADER_BYTES + names + len(message.value)


def scan(data: bytes, sync: bytes) -> Scan:
    """Read a segment, damaged or not. sync: The marker of the segment."""
    messages: list[Message] = []
    unreadable: list[tuple[int, int]] = []
    at = lost_from = 0
    while at < len(data):
        found = _frame_at(data, at, sync)
        if found is None:
            at = data.find(sync, at + 1)
            if at < 0:
                break
            continue
        if lost_from < at:
            unreadable.append((lost_from, at))
        message, at = found
        lost_from = at
        messages.append(message)
    if lost_from < len(data):
        unreadable.append((lost_from, len(data)))
    return Scan(messages, unreadable)


def _frame_at(data: bytes, at: int, sync: bytes) -> tuple[Message, int] | None:
    """Decode the frame that begins at an offset; None: no valid frame begins there.

    Returns:
        The record, and the offset of the end of the frame.
    """
    begin = at + HEADER_BYTES
    if begin > len(data):
        return None
    found, length, crc = _HEAD.unpack_from(data, at)
    (head_crc,) = _CRC.unpack_from(data, at + _HEAD.size)
    if found != sync or zlib.crc32(data[at : at + _HEAD.size]) != head_crc:
        return None
    payload = data[begin : begin + length]
    if len(payload) < max(length, _NAMES.size) or zlib.crc32(payload) != crc:
        return None
    topic_length, key_length = _NAMES.unpack_from(payload)
    topic_end = _NAMES.size + topic_length
    key_end = topic_end + key_length
    message = Message(
        payload[_NAMES.size : topic_end].decode(), payload[topic_end:key_end], payload[key_end:]
    )
    return message, begin + length

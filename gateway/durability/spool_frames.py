"""How a record lies in a segment of the spool, and how records are read back from a segment that the disk has damaged. Pure.

A frame is the segment's sync marker (8 random bytes), the length of the payload (uint32 LE), the CRC-32 of the payload (uint32 LE) and the
CRC-32 of these three (uint32 LE); then the payload: length of topic and of key (2 x uint16 LE), topic, key, value.

Where no frame begins although one should, the reader goes on at the next marker whose frame is whole. So damage costs the records that it
hits, and no others. The marker is random for the same reason as in an Avro file: a client chooses what its records hold, and must not be
able to put a frame into one that counts when the frame around it is damaged.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from gateway.durability.log import Message

SYNC_BYTES = 8
_HEAD = struct.Struct(f"<{SYNC_BYTES}sII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEAD.size + _CRC.size
_NAMES = struct.Struct("<HH")


class Scan(NamedTuple):
    """What was found in a segment: its records in order, and the ranges [start, end) of bytes that are of no whole frame."""

    messages: list[Message]
    unreadable: list[tuple[int, int]]

    @property
    def unreadable_bytes(self) -> int:
        """How many bytes are of no whole frame."""
        return sum(end - start for start, end in self.unreadable)


def frame(message: Message, sync: bytes) -> bytes:
    """One record as it lies in a segment. sync: the segment's marker."""
    topic = message.topic.encode()
    payload = _NAMES.pack(len(topic), len(message.key)) + topic + message.key + message.value
    head = _HEAD.pack(sync, len(payload), zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


def scan(data: bytes, sync: bytes) -> Scan:
    """Read a segment, damaged or not. sync: its marker."""
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
    """The whole frame that begins at an offset, and the offset of its end; None: there is none."""
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

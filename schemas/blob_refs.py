"""Store large fields outside of their record, as blobs. Pure.

The field then holds a reference, the JSON object `{"$blob": {"sha256", "size_bytes", "url"}}`, so
code that passes the field on also passes the reference on. A step also lists its blobs in `blobs`,
for queries, and after them the images that its request holds, which are also stored one by one: a
trainer reads them without the request.

A reader fetches the bytes from its own store by digest; the url only records where they were
written. A forged reference can therefore only name a blob whose content its author knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

import orjson

from clawstream.schemas.records import Blob, Reward, SessionEvent, Step
from clawstream.schemas.topics import MAX_RECORD_BYTES

Movable = Step | SessionEvent | Reward
MOVABLE: dict[type, tuple[str, ...]] = {
    Step: ("request_json", "response_json"),
    SessionEvent: ("metadata_json",),
    Reward: ("detail_json",),
}
"""Fields that may be stored as blobs.

Token fields stay in the record: every learner needs them, and two million tokens fit.
"""
SMALLEST = 4096
"""Bytes; moving less gains nothing."""
IMAGE = "image"
"""`Blob.field` of an image that the request holds."""
_PREFIX = b'{"$blob":'


class Shrunk(NamedTuple):
    """A record with references, and the bytes that must be stored before it counts."""

    record: Movable
    outside: tuple[bytes, ...]


def reference(blob: Blob) -> bytes:
    """What stands in the field."""
    return orjson.dumps(
        {"$blob": {"sha256": blob.sha256, "size_bytes": blob.size_bytes, "url": blob.url}}
    )


def referenced(field: str, value: bytes | None) -> Blob | None:
    """The blob that a field's value refers to; None when the value is the field's own."""
    if value is None or not value.startswith(_PREFIX):
        return None
    try:
        match orjson.loads(value):
            case {"$blob": {"sha256": str(digest), "size_bytes": int(size), "url": str(url)}}:
                return Blob(field=field, url=url, sha256=digest, size_bytes=size)
    except orjson.JSONDecodeError:
        pass
    return None


def images_of(step: Step) -> tuple[str, ...]:
    """SHA-256 in hex of each image that the request of a step holds, in order."""
    return tuple([blob.sha256 for blob in step.blobs if blob.field == IMAGE])


def with_images(step: Step, images: Sequence[bytes], url_of: Callable[[str], str]) -> Shrunk:
    """Add references to the images that the request of a step holds.

    Args:
        step: The record.
        images: Files, in the order of the request.
        url_of: Maps a sha256 in hex to the URL of the blob.
    """
    digests = [sha256(image).hexdigest() for image in images]
    blobs = [
        Blob(field=IMAGE, url=url_of(digest), sha256=digest, size_bytes=len(image))
        for digest, image in zip(digests, images, strict=True)
    ]
    return Shrunk(replace(step, blobs=(*step.blobs, *blobs)), tuple(images))


def shrink(
    record: Movable, size: int, url_of: Callable[[str], str], limit: int = MAX_RECORD_BYTES
) -> Shrunk:
    """Move the largest movable fields of a record outside until it fits.

    Args:
        record: The record.
        size: Its encoded length in bytes.
        url_of: Maps a sha256 in hex to the URL of the blob.
        limit: Maximum encoded length in bytes; may stay exceeded when no movable field is left.
    """
    fields = sorted(MOVABLE[type(record)], key=lambda name: -len(getattr(record, name) or b""))
    blobs: list[Blob] = []
    outside: list[bytes] = []
    for name in fields:
        data = getattr(record, name) or b""
        if size <= limit or len(data) < SMALLEST:
            break
        digest = sha256(data).hexdigest()
        blobs.append(Blob(field=name, url=url_of(digest), sha256=digest, size_bytes=len(data)))
        outside.append(data)
        size -= len(data) - 2 * len(reference(blobs[-1]))
    changed: dict[str, Any] = {blob.field: reference(blob) for blob in blobs}
    if isinstance(record, Step) and blobs:
        changed["blobs"] = (*blobs, *record.blobs)
    return Shrunk(replace(record, **changed), tuple(outside))

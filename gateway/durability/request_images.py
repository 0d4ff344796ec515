"""Finds the images that a recorded request holds. Pure."""

from __future__ import annotations

from binascii import Error, a2b_base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from clawstream.schemas.conversation import RecordedRequest, image_url_of
from clawstream.schemas.conversation.protocols import HISTORY_FIELDS, SYSTEM_FIELDS


def may_hold_images(encoded: bytes) -> bool:
    """Return whether a record could hold an image; costs a search of its bytes."""
    return b"image" in encoded and (b";base64," in encoded or b'"base64"' in encoded)


def images_in(request_json: bytes) -> list[bytes]:
    """Return the image files of a request, in the order of its messages.

    Chat Completions, Messages and Responses are read alike. Images that a request names by URL are
    not recorded: only the engine has seen them.
    """
    fields = RecordedRequest(request_json).fields or {}
    return list(_images([fields.get(name) for name in (*SYSTEM_FIELDS, *HISTORY_FIELDS)]))


def _images(conversation: list[Any]) -> Iterator[bytes]:
    left: list[Any] = [conversation]  # a stack: a client may nest deeper than calls can be
    while left:
        match left.pop():
            case list() as items:
                left.extend(reversed(items))
            case dict() as block if (url := image_url_of(block)) is not None:
                head, _, data = url.partition(",")
                if head.startswith("data:") and head.endswith(";base64"):
                    # What is no base64 the engine cannot have read either.
                    with suppress(Error, ValueError):
                        yield a2b_base64(data, strict_mode=True)
            case dict() as message:
                left.append(message.get("content", message.get("output")))

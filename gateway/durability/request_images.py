"""Finds the images that a recorded request holds. Pure."""

from __future__ import annotations

from binascii import Error, a2b_base64
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from clawstream.schemas.conversation import loaded

_CONVERSATION = ("system", "messages", "input")


def may_hold_images(encoded: bytes) -> bool:
    """Return whether a record could hold an image; costs a search of its bytes."""
    return b"image" in encoded and (b";base64," in encoded or b'"base64"' in encoded)


def images_in(request_json: bytes) -> list[bytes]:
    """Return the image files of a request, in the order of its messages.

    Chat Completions, Messages and Responses are read alike. Images that a request names by URL are
    not recorded: only the engine has seen them.
    """
    try:
        request = loaded(request_json)
    except (ValueError, RecursionError):
        return []
    if not isinstance(request, dict):
        return []
    return list(_images([request.get(name) for name in _CONVERSATION]))


def _images(conversation: list[Any]) -> Iterator[bytes]:
    left: list[Any] = [conversation]  # a stack: a client may nest deeper than calls can be
    while left:
        match left.pop():
            case list() as items:
                left.extend(reversed(items))
            case {"type": "image" | "image_url" | "input_image"} as part:
                data = _base64_of(part)
                if data is not None:
                    # What is no base64 the engine cannot have read either.
                    with suppress(Error, ValueError):
                        yield a2b_base64(data, strict_mode=True)
            case dict() as message:
                left.append(message.get("content", message.get("output")))


def _base64_of(part: Mapping[str, Any]) -> str | None:
    """Return the data of an image part; None if it only names a place."""
    match part:
        case {"source": {"type": "base64", "data": str(data)}}:
            return data
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)}:
            head, _, data = url.partition(",")
            return data if head.startswith("data:") and head.endswith(";base64") else None
    return None

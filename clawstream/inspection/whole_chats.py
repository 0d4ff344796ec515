"""Read the conversation of a step, also when its bodies are too large for a record."""

from __future__ import annotations

import time
from collections.abc import Callable

from clawstream.inspector.queries.conversation import ReadChat
from clawstream.runtime.blob_store import BlobMissing, BlobStoreAway
from clawstream.schemas.blob_refs import referenced
from clawstream.schemas.conversation import Chat, chat_of

LARGEST = 64 * 1024 * 1024
"""Bytes of a body that is read from the blob store; of a larger one the reference is shown."""
RETRY_S = 10.0
"""A store that is away is asked again after this time: each request may wait for a time-out."""


def whole_chats(get: Callable[[str], bytes], now: Callable[[], float] = time.monotonic) -> ReadChat:
    """Return what reads chats, with bodies of the blob store in place of references.

    Args:
        get: SHA-256 (hex) to bytes. A reference whose blob cannot be read stays.
        now: A monotonic clock in seconds.
    """
    asked_again_s = float("-inf")

    def whole(body: bytes) -> bytes:
        nonlocal asked_again_s
        blob = referenced("", body)
        if blob is None or blob.size_bytes > LARGEST or now() < asked_again_s:
            return body
        try:
            return get(blob.sha256)
        except BlobMissing:
            return body
        except BlobStoreAway:
            asked_again_s = now() + RETRY_S
            return body

    def read(protocol: str, request: bytes, response: bytes) -> Chat | None:
        return chat_of(protocol, whole(request), whole(response), is_whole=True)

    return read

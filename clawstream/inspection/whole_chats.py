"""Read the conversation of a step, also when its bodies are too large for a record."""

from __future__ import annotations

from collections.abc import Callable

from clawstream.export.chat import chat_of
from inspector.queries.conversation import Chat, ReadChat
from runtime.blob_store import BlobMissing, BlobStoreAway
from schemas.blob_refs import referenced

LARGEST = 64 * 1024 * 1024
"""Bytes of a body that is read from the blob store; of a larger one the reference is shown."""


def whole_chats(get: Callable[[str], bytes]) -> ReadChat:
    """Return what reads chats, with bodies of the blob store in place of references.

    Args:
        get: SHA-256 (hex) to bytes. A reference whose blob cannot be read stays.
    """

    def whole(body: bytes) -> bytes:
        blob = referenced("", body)
        if blob is None or blob.size_bytes > LARGEST:
            return body
        try:
            return get(blob.sha256)
        except (BlobMissing, BlobStoreAway):
            return body

    def read(protocol: str, request: bytes, response: bytes) -> Chat | None:
        return chat_of(protocol, whole(request), whole(response))

    return read

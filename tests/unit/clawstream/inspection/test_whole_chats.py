"""Bodies of steps that are in the blob store."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from clawstream.inspection import whole_chats as module
from clawstream.inspection.whole_chats import whole_chats
from clawstream.runtime.blob_store import BlobMissing, BlobStoreAway
from clawstream.schemas.blob_refs import reference
from clawstream.schemas.records import Blob

REQUEST = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
REPLY = json.dumps({"role": "assistant", "content": "hello"}).encode()


def stored(*bodies: bytes) -> tuple[dict[str, bytes], list[bytes]]:
    """Return a store of bodies by digest, and what the fields hold."""
    store = {sha256(body).hexdigest(): body for body in bodies}
    references = [
        reference(Blob(field="f", url="file:///x", sha256=digest, size_bytes=len(body)))
        for digest, body in store.items()
    ]
    return store, references


def test_bodies_of_the_blob_store_are_read() -> None:
    store, (request, reply) = stored(REQUEST, REPLY)
    chat = whole_chats(store.__getitem__)("openai.chat", request, reply)
    assert chat == whole_chats(store.__getitem__)("openai.chat", REQUEST, REPLY)
    assert chat is not None and [m["content"] for m in chat[0]] == ["hi", "hello"]


def test_a_body_that_cannot_be_read_is_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> bytes:
        raise BlobMissing("erased")

    store, (request,) = stored(REQUEST)
    assert whole_chats(missing)("openai.chat", request, REPLY) is None
    monkeypatch.setattr(module, "LARGEST", 4)
    assert whole_chats(store.__getitem__)("openai.chat", request, REPLY) is None


def test_a_store_that_is_away_is_asked_again_after_a_while() -> None:
    """Each request may wait for a time-out, and a page has many steps."""
    asked, times = list[str](), [0.0]

    def away(digest: str) -> bytes:
        asked.append(digest)
        raise BlobStoreAway("time-out")

    _, (request, reply) = stored(REQUEST, REPLY)
    read = whole_chats(away, lambda: times[0])
    for _ in range(3):
        assert read("openai.chat", request, reply) is None
    assert len(asked) == 1
    times[0] = module.RETRY_S
    assert read("openai.chat", request, reply) is None and len(asked) == 2

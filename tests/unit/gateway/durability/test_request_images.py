"""Images in recorded requests, and their copies in the blob store."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.log_producer import InMemoryLogProducer
from support.spool import delivery, note, wait_for

from clawstream.gateway.durability.blobs import Blobs
from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.log import Message
from clawstream.gateway.durability.request_images import images_in, may_hold_images
from clawstream.gateway.durability.spool import Spool
from clawstream.runtime.blob_store import BlobStore
from clawstream.schemas.blob_refs import IMAGE, images_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step

CODEC = Codec()
FILES = st.lists(st.binary(min_size=1, max_size=40), max_size=4)


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat(files: list[bytes]) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url(data)}} for data in files]
    return {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]}


def responses(files: list[bytes]) -> dict[str, Any]:
    seen = [{"type": "input_image", "image_url": url(data)} for data in files]
    first = {"role": "user", "content": [{"type": "input_text", "text": "t"}, *seen[:1]]}
    return {"input": [first, {"type": "function_call_output", "call_id": "c", "output": seen[1:]}]}


def messages(files: list[bytes]) -> dict[str, Any]:
    def part(data: bytes) -> dict[str, Any]:
        data64 = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data64}
        return {"type": "image", "source": source}

    parts = [part(data) for data in files]
    result = {"type": "tool_result", "tool_use_id": "c", "content": parts[:1]}
    return {"system": "s", "messages": [{"role": "user", "content": [result, *parts[1:]]}]}


@pytest.mark.parametrize("protocol", [chat, responses, messages])
@given(files=FILES)
def test_every_protocols_images_are_found_in_order(protocol: Any, files: list[bytes]) -> None:
    request = json.dumps(protocol(files)).encode()
    assert images_in(request) == files
    assert may_hold_images(request) or not files


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}},
        {"type": "image_url", "image_url": {"url": "data:image/png,abc"}},
        {"type": "image_url"},
        {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
        {"type": "text", "text": "data:image/png;base64,QUJD"},
        7,
    ],
)
def test_what_is_no_recorded_image_is_passed_over(part: Any) -> None:
    assert images_in(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()) == []


def test_a_record_that_only_mentions_images_is_not_read() -> None:
    assert not may_hold_images(b'{"content":"import base64; image = base64.b64decode(x)"}')


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_a_body_of_any_depth_is_read(depth: int) -> None:
    image = json.dumps({"type": "image_url", "image_url": {"url": url(b"x")}}).encode()
    body = b'{"messages":' + b"[" * depth + image + b"]" * depth + b"}"
    assert images_in(body) == ([b"x"] if depth == 1000 else []), "deeper than any engine reads"


@pytest.mark.parametrize("body", [b"no json", b"[]", b'"text"', b"{}", b'{"messages":{"a":1}}'])
def test_a_body_of_any_shape_is_read(body: bytes) -> None:
    assert images_in(body) == []


def chat_body(files: list[bytes]) -> bytes:
    return json.dumps(chat(files)).encode()


def a_step(**given: Any) -> Step:
    return Step(
        step_id="t~C.0", run_id="r", trajectory_key="t", call_id="t~C", choice_index=0,
        protocol="openai.chat", model="policy", status="ok", streamed=False,
        response_json=b"{}", gateway_id="g", received_at=1, finished_at=2, **given,
    )  # fmt: skip


def fit(store: BlobStore, step: Step) -> list[Any]:
    blobs = Blobs(store, CODEC, 30.0)
    fitted = blobs.fit_now([Message("steps", b"t", CODEC.encode(step))])
    blobs.close()
    return [CODEC.decode(message.value) for message in fitted]


def test_images_are_copied_once_and_named_in_order(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    request = chat_body([b"one", b"two", b"one"])
    step = a_step(request_json=request, prompt_token_ids=b"\1\0\0\0")
    (kept,) = fit(store, step)
    assert [store.get(digest) for digest in images_of(kept)] == [b"one", b"two", b"one"]
    assert {blob.field for blob in kept.blobs} == {IMAGE}
    assert replace(kept, blobs=()) == step, "the request stays as the client sent it"
    assert fit(store, kept) == [kept], "a record that waited in the spool is not copied again"
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


@pytest.mark.slow
def test_a_large_request_is_moved_and_its_images_are_still_copied(tmp_path: Path) -> None:
    store, image = BlobStore(str(tmp_path)), b"x" * (4 << 20)
    request = chat_body([image])
    (kept,) = fit(store, a_step(request_json=request, prompt_token_ids=b"\1\0\0\0"))
    assert [store.get(digest) for digest in images_of(kept)] == [image]
    assert [blob.field for blob in kept.blobs] == ["request_json", IMAGE]
    assert len(CODEC.encode(kept)) < 2000


def test_a_step_without_tokens_is_never_trained_so_its_images_are_not_copied(
    tmp_path: Path,
) -> None:
    step = a_step(request_json=chat_body([b"one"]))
    assert fit(BlobStore(str(tmp_path)), step) == [step]


def test_a_record_does_not_overtake_an_earlier_one_whose_images_are_being_stored(
    tmp_path: Path,
) -> None:
    go_on = threading.Event()

    class Slow(BlobStore):
        def put(self, data: bytes) -> str:
            go_on.wait(60)
            return super().put(data)

    step = a_step(request_json=chat_body([b"one"]), prompt_token_ids=b"\1\0\0\0")
    large = Message("steps", b"k", CODEC.encode(step))

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        for message in (large, note(1), note(2), note(3, b"other")):
            assert await it.record([message]) == "unconfirmed"
        await wait_for(lambda: producer.messages)
        assert producer.messages == [note(3, b"other")]
        go_on.set()

    blobs = Blobs(Slow(str(tmp_path / "blobs")), CODEC, 30.0)
    producer = delivery(tmp_path / "spool", body, acks="none", blobs=blobs)
    _, first, *rest = producer.messages
    assert images_of(CODEC.decode(first.value)) and rest == [note(1), note(2)]


def test_each_record_of_a_segment_has_the_time_limit_of_the_store_for_itself(
    tmp_path: Path,
) -> None:
    fitted = list[int]()

    class Counted(Blobs):
        async def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
            fitted.append(len(messages))
            return await super().fit(messages)

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        await it.record([note(1), note(2)])
        producer.reachable = True

    blobs = Counted(BlobStore(str(tmp_path / "blobs")), CODEC, 30.0)
    assert delivery(tmp_path / "spool", body, blobs=blobs).messages == [note(1), note(2)]
    assert fitted == [1, 1]

"""Unreadable replies pass unchanged and are recorded with their bytes."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest
from support.corpus import replaying, reply
from support.gateway import running
from support.log_producer import InMemoryLogProducer

from clawstream.gateway.app import create_app
from clawstream.gateway.capture.unread import MAX_UNREAD, Unread
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step
from clawstream.schemas.settings import Settings

CODEC = Codec()
EVENTS, JSON = "text/event-stream", "application/json"
DONE = b"data: [DONE]\n\n"
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}
PLAIN = json.dumps(
    {
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "finish_reason": "stop",
            }
        ],
    }
).encode()


def chunk(delta: Any, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"model": "m", "choices": [choice]}).encode() + b"\n\n"


STREAM = (
    chunk({"role": "assistant", "content": "Hel"})
    + chunk({"content": "lo"})
    + chunk({}, "stop")
    + DONE
)


class Got(NamedTuple):
    """A client's reply, and what was recorded of it."""

    status: int
    headers: dict[str, str]
    body: bytes
    steps: list[Step]

    @property
    def message(self) -> Any:
        """The only step's."""
        (step,) = self.steps
        return orjson.loads(step.response_json)

    @property
    def unread(self) -> list[bytes]:
        """The bytes that were kept."""
        return [entry["bytes"].encode(entry["encoding"]) for entry in self.message["unread"]]


def get(tmp_path: Path, made: bytes, path: str = "/v1/chat/completions", **more: Any) -> Got:
    """Ask once, before an engine that answers with these bytes."""

    async def body() -> Got:
        producer = InMemoryLogProducer()
        async with replaying({"m": made}) as engine:
            said = {"upstreams": [{"url": engine, "kind": "text"}], "worker_wait_s": 60}
            settings = Settings.model_validate({"data_dir": tmp_path, "gateway": said})
            app = create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), CODEC)
            async with running(app) as url, aiohttp.ClientSession(auto_decompress=False) as http:
                async with http.post(
                    f"{url}/t/g{path}", json={"model": "m"} | CALLS[path] | more
                ) as r:
                    got, headers = await r.read(), {k.lower(): v for k, v in r.headers.items()}
                records = [CODEC.decode(m.value) for m in producer.messages]
        return Got(r.status, headers, got, [s for s in records if isinstance(s, Step)])

    return asyncio.run(body())


def untrainable(step: Step) -> bool:
    return (step.tokens_absent_reason or "").startswith(
        "the provider reports no tokens; unread reply: "
    )


@pytest.mark.parametrize(
    "kind", ["Text/Event-Stream", "text/event-stream; charset=UTF-8", "TEXT/EVENT-STREAM"]
)
def test_the_name_of_a_content_type_has_no_case(tmp_path: Path, kind: str) -> None:
    got = get(tmp_path, reply(STREAM, kind), stream=True)
    assert (got.body, got.headers["content-type"]) == (STREAM, kind)
    assert (
        got.message == {"role": "assistant", "content": "Hello"}
        and got.steps[0].finish_reason == "stop"
    )


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", JSON])
@pytest.mark.parametrize("begin", [b"", b": wait\n\n", b"\n", b"event: message\n"])
def test_events_are_known_by_their_first_bytes(tmp_path: Path, kind: str, begin: bytes) -> None:
    got = get(tmp_path, reply(begin + STREAM, kind), stream=True)
    assert (got.body, got.headers["content-type"]) == (begin + STREAM, kind)
    assert "content-length" not in got.headers  # it was streamed
    assert got.message == {"role": "assistant", "content": "Hello"}
    got = get(tmp_path, reply(begin + STREAM, kind), stream=False)
    assert got.unread == [begin + STREAM]


def test_a_byte_order_mark_hides_no_event(tmp_path: Path) -> None:
    got = get(tmp_path, reply(codecs.BOM_UTF8 + STREAM, EVENTS), stream=True)
    assert got.body == codecs.BOM_UTF8 + STREAM
    assert got.message == {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize("ending", [b"\r\n", b"\r"])
def test_lines_end_as_the_standard_allows(tmp_path: Path, ending: bytes) -> None:
    said = STREAM.replace(b"\n", ending)
    got = get(tmp_path, reply(said, EVENTS), stream=True)
    assert got.body == said and got.message == {"role": "assistant", "content": "Hello"}


PACKED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "GZIP": gzip.compress,
}


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_packed_although_it_was_not_asked_for_is_unpacked(
    tmp_path: Path, encoding: str, stream: bool
) -> None:
    own, kind = (STREAM, EVENTS) if stream else (PLAIN, JSON)
    made = reply(PACKED[encoding](own), kind, f"content-encoding: {encoding}")
    got = get(tmp_path, made, stream=stream)
    assert (got.status, got.body) == (200, own) and "content-encoding" not in got.headers
    assert got.message == {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("encoding", "data"),
    [("br", b"\x0b\x02\x80Hello\x03"), ("gzip", b"not gzip"), ("zstd", b"\x28")],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_unpacked_passes_packed(
    tmp_path: Path, encoding: str, data: bytes, stream: bool
) -> None:
    kind = EVENTS if stream and encoding != "gzip" else JSON
    got = get(tmp_path, reply(data, kind, f"content-encoding: {encoding}"), stream=stream)
    assert (got.status, got.body) == (200, data)
    assert (got.headers["content-encoding"], got.headers["content-type"]) == (encoding, kind)
    assert got.unread == [data] and untrainable(got.steps[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "stream"),
    [
        (b"", False),
        (b"<html>busy</html>", True),
        (b'{"choices": 3, "output": 3, "content": 3}', False),
        (b"\xff\xfe{", True),
    ],
)
@pytest.mark.parametrize("path", CALLS)
def test_a_reply_that_is_none_passes_and_is_kept(
    tmp_path: Path, path: str, data: bytes, stream: bool
) -> None:
    got = get(tmp_path, reply(data, "text/html"), path, stream=stream)
    assert (got.status, got.headers["content-type"], got.body) == (200, "text/html", data)
    (step,) = got.steps
    assert got.unread == [data] and untrainable(step)
    assert (step.status, step.step_id) == ("ok", got.headers["x-clawstream-step"])


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("stream", [True, False])
def test_an_error_that_calls_itself_a_success_is_no_step(
    tmp_path: Path, path: str, stream: bool
) -> None:
    said = b'{"error": {"message": "Provider returned error", "code": 502}}'
    got = get(tmp_path, reply(said, JSON), path, stream=stream)
    assert (got.status, got.body, got.steps) == (200, said, [])


def test_a_stream_that_comes_whole_is_a_reply(tmp_path: Path) -> None:
    got = get(tmp_path, reply(PLAIN, JSON), stream=True)
    assert got.body == PLAIN and got.message == {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize("path", CALLS)
def test_an_event_that_is_none_costs_itself_alone(tmp_path: Path, path: str) -> None:
    made, text = WELL[path]
    events = [e + b"\n\n" for e in made.removesuffix(b"\n\n").split(b"\n\n")]
    wrong = b'data: {"choices": [{"index": 0, "delta": 7, "text": 7}], "type": 7}\n\n'
    said = b"".join([*events[:2], wrong, *events[2:]])
    got = get(tmp_path, reply(said, EVENTS), path, stream=True)
    assert got.body == said
    assert got.unread == [wrong] and untrainable(got.steps[0])
    assert text in json.dumps(got.message) and got.steps[0].status == "ok"


def named(*events: dict[str, Any]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events
    )


def text_chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


WELL: dict[str, tuple[bytes, str]] = {
    "/v1/chat/completions": (STREAM, '"content": "Hello"'),
    "/v1/completions": (
        text_chunk("Hel") + text_chunk("lo") + text_chunk("", "stop") + DONE,
        '"text": "Hello"',
    ),
    "/v1/responses": (
        named(
            {
                "type": "response.output_text.delta",
                "output_index": 0,
                "content_index": 0,
                "delta": "Hel",
            },
            {
                "type": "response.output_text.delta",
                "output_index": 0,
                "content_index": 0,
                "delta": "lo",
            },
            {"type": "response.completed", "response": {"status": "completed", "output": None}},
        ),
        '"text": "Hello"',
    ),
    "/v1/messages": (
        named(
            {"type": "message_start", "message": {"role": "assistant", "content": []}},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": "Hel"},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "lo"},
            },
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
            {"type": "message_stop"},
        ),
        '"text": "Hello"',
    ),
}


def test_a_stream_of_nothing_but_the_unread_is_a_step(tmp_path: Path) -> None:
    said = b"data: nothing\n\ndata: to read\n\n" + DONE
    got = get(tmp_path, reply(said, EVENTS), stream=True)
    assert got.body == said
    assert b"".join(got.unread) + DONE == said and untrainable(got.steps[0])


def test_an_error_behind_the_unread_ends_a_call_with_several_choices(tmp_path: Path) -> None:
    wrong, error = b'data: {"choices": 3}\n\n', b'data: {"error": {"message": "broken"}}\n\n'
    got = get(tmp_path, reply(wrong + error, EVENTS), stream=True, n=2)
    assert got.body == wrong + error
    assert got.headers["x-clawstream-step"] == ",".join(step.step_id for step in got.steps)
    assert len(got.steps) == 2
    assert all(step.status == "error" and untrainable(step) for step in got.steps)
    assert orjson.loads(got.steps[0].response_json)["unread"][0]["bytes"].encode() == wrong


def test_the_bytes_behind_the_last_event_pass_too(tmp_path: Path) -> None:
    said = STREAM + b": a comment without its blank line"
    got = get(tmp_path, reply(said, EVENTS), stream=True)
    assert got.body == said and got.message == {"role": "assistant", "content": "Hello"}


def test_what_breaks_off_within_an_event_ends_in_an_error_of_its_own(tmp_path: Path) -> None:
    cut = b'data: {"choices": [{"ind'
    got = get(tmp_path, reply(chunk({"content": "Hel"}) + cut, EVENTS), stream=True)
    events = got.body.split(b"\n\n")
    assert events[:2] == [chunk({"content": "Hel"}).removesuffix(b"\n\n"), cut]
    assert b'"upstream_failed"' in events[2] and got.steps[0].status == "error"


def test_halves_of_an_emoji_are_read_as_clients_read_them(tmp_path: Path) -> None:
    halves = [
        rb'data: {"choices":[{"index":0,"delta":{"content":"\ud83d"}}]}',
        rb'data: {"choices":[{"index":0,"delta":{"content":"\ude00"}}]}',
    ]
    alone = rb'data: {"choices":[{"index":0,"delta":{"content":"\ud83d!"},"logprobs":NaN}]}'
    said = b"\n\n".join([*halves, alone, chunk({}, "stop") + DONE])
    got = get(tmp_path, reply(said, EVENTS), stream=True)
    assert got.body == said and got.message == {"role": "assistant", "content": "\U0001f600\ufffd!"}


def test_what_is_kept_of_the_unread_is_bounded() -> None:
    unread = Unread()
    for _ in range(5):
        unread.add(b"x" * (MAX_UNREAD // 2), "why")
    kept = orjson.loads(unread.beside(b'{"content":"a"}'))
    assert kept["content"] == "a"
    assert sum(len(entry["bytes"]) for entry in kept["unread"]) == MAX_UNREAD
    assert [entry["size_bytes"] for entry in kept["unread"]] == [MAX_UNREAD // 2] * 5

"""Helpers for tests of wire protocols: cut streams, scripted replies, invalid JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson
from hypothesis import strategies as st
from support.scripted.script import Json, ProtocolServer, Script, ScriptedChoice

from clawstream.gateway.asgi.sse import EventSplitter, data_of
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.capture.stream import EventStream
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.base import NOT_THE_PROTOCOL, EngineKind, ParsedReply

LOOK: Json = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"key": "k1"}'},
}
ADD: Json = {
    "id": "call_2",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": "ü\\n"}'},
}


class Streamed(NamedTuple):
    """The bytes sent to the client, the parsed reply, and the errors found."""

    client: bytes
    reply: ParsedReply
    failure: str | None
    held: bytes


def streamed(
    adapter: ProtocolAdapter, body: bytes, kind: EngineKind, data: bytes, cuts: Iterable[int] = ()
) -> Streamed:
    """Pass a stream through the gateway's reader, cut into pieces at these positions."""
    stream = EventStream(adapter.accumulator(adapter.parse_request(body), kind), CapturedTokens())
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    sent = b"".join(stream.feed(data[a:b]) for a, b in itertools.pairwise(places))
    stream.close()
    failure = stream.failure.message if stream.failure is not None else None
    return Streamed(sent + stream.held(), stream.whole(), failure, stream.held())


def written(
    server: ProtocolServer, request: Json, choices: Sequence[ScriptedChoice], **more: Any
) -> bytes:
    """Return a whole stream as the engine writes it."""
    return b"".join(e.data for e in server.events(request, Script(choices, **more)))


def plain(
    server: ProtocolServer, request: Json, choices: Sequence[ScriptedChoice], **more: Any
) -> bytes:
    """Return a plain reply as the engine writes it."""
    return orjson.dumps(server.plain(request, Script(choices, **more)))


def scripted_choices(
    finish: Sequence[str] = ("stop", "length"), tools: bool = True
) -> st.SearchStrategy[ScriptedChoice]:
    """Generate choices: texts (some empty, some reasoning) followed by tool calls."""

    def make(texts: list[str], reasoning: int, calls: list[Json], reason: str) -> ScriptedChoice:
        return ScriptedChoice(
            ids=range(10, 10 + len(texts)),
            texts=texts,
            logprobs=[-i / 8 for i in range(len(texts))],
            tool_calls=calls,
            finish_reason="tool_calls" if calls else reason,
            reasoning=min(reasoning, len(texts)),
        )

    texts = st.lists(st.text(max_size=4), min_size=1, max_size=6)
    calls = st.sampled_from([[], [], [LOOK], [LOOK, ADD]]) if tools else st.just([])
    return st.builds(make, texts, st.integers(0, 3), calls, st.sampled_from(finish))


def json_values() -> st.SearchStrategy[Any]:
    """Generate JSON values of any shape."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-2, 3)
        | st.floats(allow_nan=False)
        | st.text(max_size=3)
    )
    names = st.sampled_from(["type", "text", "index", "message", "error", "x"])
    return st.recursive(
        leaves,
        lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=4),
        max_leaves=8,
    )


@st.composite
def broken(draw: st.DrawFn, server: ProtocolServer, request: Json) -> list[Any]:
    """Generate the events of a stream with replaced, missing or duplicate values."""
    stream = EventSplitter().feed(written(server, request, [draw(scripted_choices())]))
    events: list[Any] = [
        orjson.loads(d) for e in stream if (d := data_of(e)) is not None and d != b"[DONE]"
    ]
    for event in draw(st.permutations(events))[: draw(st.integers(0, 4))]:
        holder, place = draw(st.sampled_from(list(_places(event))))
        holder[place] = draw(json_values())
    lost = draw(st.sets(st.integers(0, len(events) - 1), max_size=3))
    return [e for at, e in enumerate(events) if at not in lost] + draw(
        st.lists(json_values(), max_size=2)
    )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for place, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, place
        if isinstance(inner, dict | list):
            yield from _places(inner)


def takes_or_refuses(
    adapter: ProtocolAdapter, body: bytes, kind: EngineKind, events: Iterable[Any]
) -> None:
    """Check that `read` refuses an event, or that the event can be added without an error."""
    accumulator = adapter.accumulator(adapter.parse_request(body), kind)
    for said in events:
        data = orjson.dumps(said)
        try:
            parsed = accumulator.read(b"data: " + data + b"\n\n", data)
        except NOT_THE_PROTOCOL:
            continue
        assert isinstance(parsed.client_bytes, bytes)
        if parsed.update is not None:
            accumulator.add(parsed.update)
        for choice in accumulator.reply().choices:
            assert isinstance(orjson.loads(choice.message_json), dict)
            assert choice.finish_reason is None or isinstance(choice.finish_reason, str)
        accumulator.unfinished()

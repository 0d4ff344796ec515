"""The work for a reply or body in pieces grows with its size, not with its square."""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson
import pytest

from gateway.asgi.sse import EventSplitter
from gateway.capture.engine_tokens import CapturedTokens
from gateway.capture.stream import EventStream
from gateway.errors import BadRequest
from gateway.protocols.adapter import ProtocolAdapter
from gateway.protocols.anthropic_messages import AnthropicMessages
from gateway.protocols.openai_chat import OpenAIChat
from gateway.protocols.openai_responses import OpenAIResponses
from gateway.protocols.request_fields import MAX_MODEL, repaired

ASK = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "stream": True}
LONG = "abcd" * 100
CHAT, MESSAGES, RESPONSES = OpenAIChat(), AnthropicMessages(), OpenAIResponses()
CALL = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {
    "name": "f", "arguments": LONG}}]}}]}  # fmt: skip
CUSTOM = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "custom": {
    "input": LONG}}]}}]}  # fmt: skip
DETAILS = {"choices": [{"index": 0, "delta": {"reasoning_details": [
    {"type": "reasoning.text", "text": LONG}]}}]}  # fmt: skip
LEGACY = {"choices": [{"index": 0, "delta": {"function_call": {"arguments": LONG}}}]}
AUDIO = {"choices": [{"index": 0, "delta": {"audio": {"data": LONG, "transcript": "a"}}}]}
PARTS = {"choices": [{"index": 0, "delta": {"content": [{"type": "text", "text": LONG}]}}]}
INPUT = {"type": "content_block_delta", "index": 0, "delta": {
    "type": "input_json_delta", "partial_json": LONG}}  # fmt: skip
SKETCH = {"type": "content_block_delta", "index": 0, "delta": {"type": "x_delta", "x": LONG}}
ARGUMENTS = {"type": "response.function_call_arguments.delta", "delta": LONG}


def grows(work: Callable[[int], object], size: int) -> float:
    """Return how the processor time grows when the size does so eightfold: 8 is linear."""

    def cost(of: int) -> float:
        costs = []
        for _ in range(3):
            began = time.process_time()
            work(of)
            costs.append(time.process_time() - began)
        return min(costs)

    return cost(8 * size) / max(cost(size), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "delta"),
    [
        (CHAT, CALL), (CHAT, CUSTOM), (CHAT, DETAILS), (CHAT, LEGACY), (CHAT, AUDIO), (CHAT, PARTS),
        (MESSAGES, INPUT), (MESSAGES, SKETCH), (RESPONSES, ARGUMENTS),
    ],
)  # fmt: skip
def test_a_stream_in_small_deltas(adapter: ProtocolAdapter, delta: object) -> None:
    request = adapter.parse_request(orjson.dumps(ASK))
    event = b"data: " + orjson.dumps(delta) + b"\n\n"

    def read(deltas: int) -> None:
        stream = EventStream(adapter.accumulator(request, "text"), CapturedTokens())
        for _ in range(deltas):
            stream.feed(event)
        parsed = stream.whole()
        assert parsed is not None and parsed.choices[0].message_json.count(LONG.encode()) == deltas

    assert grows(read, 500) < 24


@pytest.mark.slow
def test_an_event_in_small_pieces() -> None:
    def split(pieces: int) -> None:
        splitter, out = EventSplitter(), []
        for piece in [b"data: ", *[b"x" * 64] * pieces, b"\n\n"]:
            out += splitter.feed(piece)
        assert len(out) == 1

    assert grows(split, 10_000) < 24


@pytest.mark.slow
@pytest.mark.parametrize(
    "repeated", [rb"\n", rb"\ud83d", rb"\ud83d\ude00", rb"\\", rb"\u00e9", b"a", b"\\"]
)
def test_escapes(repeated: bytes) -> None:
    body = repeated * ((1 << 20) // len(repeated))
    costs = []
    for _ in range(3):
        began = time.process_time()
        repaired(body)
        costs.append(time.process_time() - began)
    assert min(costs) < 0.1  # of a MiB


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (rb'"\ud83d\ude00"', rb'"\ud83d\ude00"'),
        (rb'"\ud83d\ud83d\ude00\ude00"', rb'"\ufffd\ud83d\ude00\ufffd"'),
        (rb'"\\ud83d"', rb'"\\ud83d"'),
        (rb'"\\\ud83d"', rb'"\\\ufffd"'),
        (rb'"\ude00\\\uD83D\UDE00"', rb'"\ufffd\\\ufffd\UDE00"'),
        (b'"\0\0\\ud83d"', b'"\0\0\\ud83d"'),
    ],
)
def test_halves_of_characters(given: bytes, expected: bytes) -> None:
    assert repaired(given) == expected


@pytest.mark.parametrize("adapter", [CHAT, MESSAGES, RESPONSES])
def test_a_model_name_is_short(adapter: ProtocolAdapter) -> None:
    name = "m" * MAX_MODEL
    assert adapter.parse_request(orjson.dumps(ASK | {"model": name})).model == name
    with pytest.raises(BadRequest) as refused:
        adapter.parse_request(orjson.dumps(ASK | {"model": name + "m"}))
    assert refused.value.param == "model"

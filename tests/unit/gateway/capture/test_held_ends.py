"""Which events wait for the record: the end of a reply, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.capture.steps import Call, steps_of
from clawstream.gateway.capture.stream import EventStream
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.anthropic_messages import AnthropicMessages
from clawstream.gateway.protocols.base import ParsedReply
from clawstream.gateway.protocols.openai_chat import OpenAIChat
from clawstream.gateway.protocols.openai_completions import OpenAICompletions
from clawstream.schemas import engine_frames
from clawstream.schemas.tokens import pack_ids, pack_logprobs

DONE = b"data: [DONE]\n\n"
CHAT, MESSAGES, COMPLETIONS = OpenAIChat(), AnthropicMessages(), OpenAICompletions()
ASK = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 5}


def event(payload: Any) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def chunk(text: str, finish: str | None = None, index: int = 0) -> bytes:
    return event({
        "choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]
    })  # fmt: skip


def text_chunk(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def piece(text: str) -> bytes:
    delta = {"type": "text_delta", "text": text}
    return event({"type": "content_block_delta", "index": 0, "delta": delta})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
CALL = event({"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"name": "f"}}]}}]})
ROLE = event({"choices": [{"index": 1, "delta": {"role": "assistant", "content": ""}}]})
STOPS = event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})
WAIT = b": wait\n\n"


@pytest.mark.parametrize(
    ("adapter", "n", "events", "outs"),
    [
        (CHAT, 1, [chunk("a"), chunk("b", "stop"), USAGE, DONE], [[0], [], [], []]),
        (CHAT, 1, [chunk("a", "stop"), chunk("b", "stop"), DONE], [[], [0], []]),
        (CHAT, 1, [chunk("a", "stop"), WAIT, CALL, DONE], [[], [], [0, 1, 2], []]),
        (CHAT, 2, [chunk("a", "stop"), ROLE, chunk("b", None, 1), chunk("c", "stop", 1), DONE],
        [[], [], [0, 1, 2], [], []]),
        (CHAT, 1, [chunk("a", "stop"), event({"error": "x"}), chunk("b")], [[], [], []]),
        (CHAT, 1, [chunk("a"), DONE, chunk("b")], [[0], [], []]),
        (COMPLETIONS, 1, [text_chunk("a", "stop"), text_chunk("b", "stop"), text_chunk("", "stop")],
        [[], [0], []]),
        (MESSAGES, 1, [piece("a"), STOPS, piece("b"), STOPS], [[0], [], [1, 2], []]),
    ],
)  # fmt: skip
def test_only_the_last_end_waits(
    adapter: ProtocolAdapter, n: int, events: Sequence[bytes], outs: Sequence[Sequence[int]]
) -> None:
    request = adapter.parse_request(orjson.dumps(ASK | {"n": n, "stream": True}))
    stream = EventStream(adapter.accumulator(request, "text"), CapturedTokens())
    sent = [stream.feed(each) for each in events]
    assert sent == [b"".join(events[i] for i in out) for out in outs]
    stream.close()
    assert b"".join(sent) + stream.held() == b"".join(events)


def test_tokens_without_a_choice_are_never_trained() -> None:
    captured = CapturedTokens("none")
    told = (0, pack_ids([7]), pack_logprobs([-0.5]), "stop", None)
    captured.add([engine_frames.Frame(0, pack_ids([1]), (told,))])
    request = CHAT.parse_request(orjson.dumps(ASK))
    call = Call("openai.chat", {}, 1)
    call.trajectory, call.call_id = TrajectoryRef("r", "t", "g", "train"), "t~1"
    call.request, call.body, call.gateway_id = request, b"{}", "gateway-0"
    call.captured = captured
    (step,) = steps_of(call, ParsedReply((), None, b"{}"), "ok", 2)
    assert step.response_token_ids == pack_ids([7])
    assert "unread reply" in (step.tokens_absent_reason or "")


def test_what_was_sent_is_what_the_client_has() -> None:
    request = CHAT.parse_request(orjson.dumps(ASK | {"stream": True}))
    stream = EventStream(CHAT.accumulator(request, "text"), CapturedTokens())
    for each in (chunk("a", "stop"), chunk("b", "stop")):
        stream.feed(each)
    (sent,), (whole,) = (reply.choices for reply in (stream.sent(), stream.whole()) if reply)
    assert orjson.loads(sent.message_json)["content"] == "a"
    assert orjson.loads(whole.message_json)["content"] == "ab"

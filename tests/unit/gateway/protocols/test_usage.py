"""What a reply's usage says, in any protocol, and that it goes on the call's first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.protocols.anthropic_messages import AnthropicMessagesAccumulator
from clawstream.gateway.protocols.openai_responses import OpenAIResponsesAccumulator
from clawstream.gateway.protocols.usage import merged, usage_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Usage

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            {
                "prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27,
                "prompt_tokens_details": {"cached_tokens": 16},
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            (20, 16, 7, 3),
        ),
        (
            {
                "input_tokens": 20, "input_tokens_details": {"cached_tokens": 16},
                "output_tokens": 7,
                "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 27,
            },
            (20, 16, 7, 3),
        ),
        ({"input_tokens": 4, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 6,
        "output_tokens": 7}, (20, 10, 7, None)),
        ({"prompt_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": None},
        (3, None, 0, None)),
        ({"prompt_tokens": "3", "completion_tokens": -1, "total_tokens": True}, None),
        ({}, None),
        (None, None),
        ([1], None),
    ],
)  # fmt: skip
def test_usage_in_the_words_of_every_protocol(
    said: Any, expected: tuple[int | None, ...] | None
) -> None:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
    assert usage_of(said) == (
        None if expected is None else Usage(**dict(zip(names, expected, strict=True)))
    )


def test_what_was_counted_comes_before_what_was_said() -> None:
    said = Usage(prompt_tokens=1, cached_tokens=2, completion_tokens=3, reasoning_tokens=4)
    assert merged(Usage(prompt_tokens=9, completion_tokens=8), said) == Usage(
        prompt_tokens=9, cached_tokens=2, completion_tokens=8, reasoning_tokens=4
    )
    assert merged(None, said) == merged(said, None) == said and merged(None, None) is None


def test_a_streamed_message_says_its_usage_in_two_events() -> None:
    accumulator = AnthropicMessagesAccumulator()
    for data in (
        b'{"type":"message_start","message":{"content":[],"usage":{"input_tokens":4,"output_tokens":1,"cache_read_input_tokens":6}}}',
        b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":12,"input_tokens":null}}',
    ):
        accumulator.add(accumulator.read(b"", data).update)
    assert accumulator.reply().usage == Usage(
        prompt_tokens=10, cached_tokens=6, completion_tokens=12
    )


def test_a_streamed_response_says_its_usage_in_its_last_event() -> None:
    accumulator = OpenAIResponsesAccumulator()
    usage = b'{"input_tokens":4,"output_tokens":1}'
    data = b'{"type":"response.completed","response":{"output":[],"usage":%s}}' % usage
    accumulator.add(accumulator.read(b"", data).update)
    assert accumulator.reply().usage == Usage(prompt_tokens=4, completion_tokens=1)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_first_step_of_a_call_has_its_usage(tmp_path: Path, path: str, stream: bool) -> None:
    """Of an engine that tells no tokens: what its reply says."""

    async def scenario(w: GatewayFixture) -> None:
        body: dict[str, Any] = {"model": "policy", "stream": stream, "n": 2}
        body |= (
            {"prompt": "hi"}
            if path == "completions"
            else {"messages": [{"role": "user", "content": "hi"}]}
        )
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        async with w.http.post(f"{w.url}/t1/g1/v1/{path}", json=body) as reply:
            assert reply.status == 200 and b'"usage"' in await reply.read()
        first, second = w.steps()
        assert (
            first.usage is not None
            and first.usage.prompt_tokens == 3
            and first.usage.completion_tokens == 6
        )
        assert second.usage is None

    run_gateway(tmp_path, Codec(), scenario, Script([HI, HI]), kind="text")

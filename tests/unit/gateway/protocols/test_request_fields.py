"""Repairs and checks of request bodies."""

from __future__ import annotations

import orjson
import pytest

from clawstream.gateway.errors import BadRequest
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.anthropic_messages import AnthropicMessages
from clawstream.gateway.protocols.openai_chat import OpenAIChat
from clawstream.gateway.protocols.openai_responses import OpenAIResponses
from clawstream.gateway.protocols.request_fields import MAX_MODEL, repaired

ASK = {"messages": [{"role": "user", "content": "hi"}], "input": "hi"}
CHAT, MESSAGES, RESPONSES = OpenAIChat(), AnthropicMessages(), OpenAIResponses()


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

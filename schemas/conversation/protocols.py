"""The protocols that Clawstream records. A new one is a file here and a line below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TypeVar

from clawstream.schemas.conversation.anthropic_messages import ANTHROPIC_MESSAGES
from clawstream.schemas.conversation.openai_chat import OPENAI_CHAT
from clawstream.schemas.conversation.openai_completions import OPENAI_COMPLETIONS
from clawstream.schemas.conversation.openai_responses import OPENAI_RESPONSES
from clawstream.schemas.conversation.protocol import Protocol

_ALL = (OPENAI_CHAT, OPENAI_COMPLETIONS, ANTHROPIC_MESSAGES, OPENAI_RESPONSES)
PROTOCOLS: Mapping[str, Protocol] = {protocol.name: protocol for protocol in _ALL}
"""By name, as in `Step.protocol`."""

T = TypeVar("T")


def _of_all(values: Iterable[T | None]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(value for value in values if value is not None))


# A record need not say which protocol it follows, so its shape is compared with those of all. These
# are tuples and no sets: a value of JSON may have no hash.
HISTORY_FIELDS = _of_all(protocol.history for protocol in _ALL)
SYSTEM_FIELDS = _of_all(protocol.system for protocol in _ALL)
PROMPT_FIELDS = frozenset(
    ("model", *HISTORY_FIELDS, *SYSTEM_FIELDS, *chain.from_iterable(p.prompt for p in _ALL))
)
"""Fields of a request that make its prompt. The others say how to sample, send or label it."""
SAID_BLOCKS = _of_all(chain.from_iterable(protocol.said for protocol in _ALL))
ASKED_BLOCKS = _of_all(chain.from_iterable(protocol.asked for protocol in _ALL))
SERVER_ITEMS = _of_all(chain.from_iterable(protocol.server_items for protocol in _ALL))
TOOL_SCHEMAS = _of_all(protocol.tool_schema for protocol in _ALL)
OUTPUT_FIELDS = _of_all(protocol.output for protocol in _ALL)
CALLS = _of_all(protocol.calls for protocol in _ALL)
THOUGHTS = _of_all(protocol.thoughts for protocol in _ALL)
RESULTS = _of_all(protocol.result for protocol in _ALL)
IMAGES = _of_all(protocol.image for protocol in _ALL)

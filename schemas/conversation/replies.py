"""Read a recorded reply of any protocol: its words and calls. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clawstream.schemas.conversation.items import calls_of, texts_of
from clawstream.schemas.conversation.protocol import Call, objects_in
from clawstream.schemas.conversation.protocols import OUTPUT_FIELDS

AUXILIARY_TAGS = frozenset({"sub_agent", "title", "summary", "compaction"})
"""Tags of an agent's auxiliary calls; their replies are not the agent's answer."""


def items_of(reply: Any) -> list[dict[str, Any]]:
    """List the messages and items of a reply: the output of Responses, else one message."""
    if not isinstance(reply, dict):
        return []
    for field in OUTPUT_FIELDS:
        if isinstance(output := reply.get(field), list):
            return objects_in(output)
    if "content" not in reply and isinstance(reply.get("text"), str):  # of completions
        return [{"content": reply["text"]}]
    return [reply]


def texts_in(reply: Any) -> Iterator[str]:
    """Yield everything that the model said in words in a reply."""
    for item in items_of(reply):
        yield from texts_of(item)


def calls_in(reply: Any) -> Iterator[Call]:
    """Yield every tool call of a reply."""
    for item in items_of(reply):
        yield from calls_of(item)


def answer_in(reply: Any) -> str | None:
    """Return the text of the last message of a reply that has one; None when no message has.

    The blocks of one message are joined without a separator, as the providers' SDKs do.
    """
    for item in reversed(items_of(reply)):
        if text := "".join(texts_of(item)):
            return text
    return None

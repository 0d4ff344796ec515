"""Anthropic Messages: calls, their results and reasoning are content blocks. Pure."""

from __future__ import annotations

from clawstream.schemas.conversation.protocol import (
    ENCRYPTED,
    Call,
    Item,
    Protocol,
    ToolResult,
    call_of,
    texts_among,
)


def calls(message: Item) -> list[Call]:
    """Return the calls in blocks `tool_use`."""
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [
        call_of(block.get("id"), block, True)
        for block in content
        if isinstance(block, dict) and block.get("type") == "tool_use"
    ]


def thoughts(message: Item) -> list[str]:
    """Return the reasoning in blocks; an encrypted one as a note.

    Servers that copy the protocol call a block `thinking` also `reasoning`.
    """
    content = message.get("content")
    texts = list[object]()
    for block in content if isinstance(content, list) else ():
        if not isinstance(block, dict):
            continue
        if block.get("type") in ("thinking", "reasoning"):
            texts.append(block.get("thinking") or block.get("text"))
        elif block.get("type") == "redacted_thinking":
            texts.append(ENCRYPTED)
    return texts_among(texts)


def result(block: Item) -> ToolResult | None:
    """Return the result that a block `tool_result` is."""
    if block.get("type") != "tool_result":
        return None
    return ToolResult(block.get("tool_use_id"), block.get("content"))


def image(block: Item) -> str | None:
    """Return the URL of an image block, as a data URL if the block has the data."""
    match block:
        case {"source": {"media_type": str(media_type), "data": str(data)}} if (
            media_type.startswith("image/")
        ):
            return f"data:{media_type};base64,{data}"
    return None


ANTHROPIC_MESSAGES = Protocol(
    name="anthropic.messages",
    history="messages",
    system="system",
    prompt=("tools", "tool_choice"),
    said=("text",),
    asked=("text",),
    tool_schema="input_schema",
    calls=calls,
    thoughts=thoughts,
    result=result,
    image=image,
)

"""Read one message or item of any protocol: its words, calls, reasoning, results and images. Pure.

No shape is trusted: unexpected content counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clawstream.schemas.conversation.protocol import Call, Item, ToolResult
from clawstream.schemas.conversation.protocols import (
    ASKED_BLOCKS,
    CALLS,
    IMAGES,
    RESULTS,
    SAID_BLOCKS,
    SERVER_ITEMS,
    THOUGHTS,
)


def is_model_item(item: Any) -> bool:
    """Return whether the model's side produced a message or item of a request."""
    return isinstance(item, dict) and (
        item.get("role") == "assistant"
        or (kind := str(item.get("type"))) in SERVER_ITEMS
        or kind.endswith("_call")
    )


def is_said(item: Item) -> bool:
    """Return whether an item has words or calls of the model. A client repeats such an item."""
    role = item.get("role")
    return role == "assistant" or (role is None and bool(calls_of(item)))


def texts_of(item: Item) -> Iterator[str]:
    """Yield what the model said in words in one message or item; reasoning is left out."""
    content = item.get("content")
    if isinstance(content, str):
        if content:
            yield content
    elif isinstance(content, list):
        for block in content:
            text = block
            if isinstance(block, dict):
                text = (
                    block.get("text", block.get("refusal"))
                    if block.get("type") in SAID_BLOCKS
                    else None
                )
            if isinstance(text, str) and text:
                yield text
    refusal = item.get("refusal")
    if isinstance(refusal, str) and refusal:
        yield refusal


def texts_in_content(content: Any) -> Iterator[str]:
    """Yield the texts of what the model got: of a string, or of a list of blocks."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for block in content:
            text = block
            if isinstance(block, dict):
                text = block.get("text") if block.get("type") in ASKED_BLOCKS else None
            if isinstance(text, str):
                yield text


def calls_of(item: Item) -> list[Call]:
    """Return the tool calls of one message or item, in order."""
    return [call for read in CALLS for call in read(item)]


def reasoning_of(item: Item) -> list[str]:
    """Return what the model thought in words in one message or item."""
    return [text for read in THOUGHTS for text in read(item)]


def result_of(block: Any) -> ToolResult | None:
    """Return the tool result that an item or a content block is."""
    if not isinstance(block, dict):
        return None
    return next((result for read in RESULTS if (result := read(block)) is not None), None)


def image_url_of(block: Any) -> str | None:
    """Return the URL of the image that a content block is; a data URL if the block holds it."""
    if not isinstance(block, dict):
        return None
    return next((url for read in IMAGES if (url := read(block)) is not None), None)

"""What requests and replies of every protocol say: texts, tool calls, reasoning. Pure.

No shape is trusted: unexpected content counts as absent, and nothing raises but `loaded`.
"""

from __future__ import annotations

from clawstream.schemas.conversation.items import (
    AUXILIARY_TAGS,
    CALL_ITEMS,
    SERVER_ITEMS,
    TEXT_BLOCKS,
    Call,
    answer_in,
    calls_in,
    calls_of,
    is_model_item,
    items_of,
    loaded,
    reasoning_of,
    texts_in,
    texts_of,
    without_thoughts,
)

__all__ = [
    "AUXILIARY_TAGS",
    "CALL_ITEMS",
    "SERVER_ITEMS",
    "TEXT_BLOCKS",
    "Call",
    "answer_in",
    "calls_in",
    "calls_of",
    "is_model_item",
    "items_of",
    "loaded",
    "reasoning_of",
    "texts_in",
    "texts_of",
    "without_thoughts",
]

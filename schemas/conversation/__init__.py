"""What requests and replies say: system prompt, turns, tool calls, reasoning, images. Pure.

`protocols` lists the protocols, each a file that says how it writes these things. The functions
here read all of them alike, by shape, so that a reader needs no case for a protocol. No shape is
trusted: unexpected content counts as absent, and nothing raises but `loaded`. Time is linear in the
length of a body.

Reading order: `protocol`, one of the protocols such as `openai_responses`, `items`, `requests`,
`replies`, `chats`.
"""

from __future__ import annotations

from clawstream.schemas.conversation.chats import Chat, chat_of
from clawstream.schemas.conversation.items import (
    calls_of,
    image_url_of,
    is_model_item,
    is_said,
    reasoning_of,
    result_of,
    texts_in_content,
    texts_of,
)
from clawstream.schemas.conversation.parsing import loaded
from clawstream.schemas.conversation.protocol import Call
from clawstream.schemas.conversation.replies import (
    AUXILIARY_TAGS,
    answer_in,
    calls_in,
    items_of,
    texts_in,
)
from clawstream.schemas.conversation.requests import RecordedRequest, history_of
from clawstream.schemas.conversation.thoughts import without_thoughts

__all__ = [
    "AUXILIARY_TAGS",
    "Call",
    "Chat",
    "RecordedRequest",
    "answer_in",
    "calls_in",
    "calls_of",
    "chat_of",
    "history_of",
    "image_url_of",
    "is_model_item",
    "is_said",
    "items_of",
    "loaded",
    "reasoning_of",
    "result_of",
    "texts_in",
    "texts_in_content",
    "texts_of",
    "without_thoughts",
]

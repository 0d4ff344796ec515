"""The messages that a request adds to its conversation, for reward functions. Pure."""

from __future__ import annotations

import json
from typing import Any

import orjson

from clawstream.schemas.conversation import RecordedRequest, is_model_item

SHORTEST = 64
"""Characters that are left of a string at least."""


def new_messages(request: RecordedRequest, limit: int) -> bytes | None:
    """Return the messages of a request after its last model turn; without one, all messages.

    A request of the next turn has what the agent got as the answer to its last reply: a user's
    message, or results of tools. Long strings, such as files and images, lose their middle until
    the messages have `limit` bytes.

    Args:
        request: Of a step.
        limit: Bytes; 0: no messages are wanted.

    Returns:
        A JSON array; None if the request is unreadable, has no messages or too many for the limit.
    """
    items = request.history if limit else None
    if items is None:
        return None
    end = len(items)
    while end and is_model_item(items[end - 1]):
        end -= 1  # the beginning of the reply, which some clients give
    begin = end
    while begin and not is_model_item(items[begin - 1]):
        begin -= 1
    added, longest = items[begin:end], limit
    try:
        packed = _packed(added)
        while len(packed) > limit and longest > SHORTEST:
            longest //= 2
            packed = _packed(_shortened(added, longest))
    except RecursionError:
        return None
    return packed if len(packed) <= limit else None


def _shortened(value: Any, longest: int) -> Any:
    """Return a JSON value whose strings have about `longest` characters at most."""
    if isinstance(value, str) and len(value) > longest:
        half = longest // 2
        return f"{value[:half]}[... {len(value) - 2 * half} characters ...]{value[-half:]}"
    if isinstance(value, list):
        return [_shortened(item, longest) for item in value]
    if isinstance(value, dict):
        return {key: _shortened(item, longest) for key, item in value.items()}
    return value


def _packed(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # a lone surrogate, or a large integer
        return json.dumps(value).encode()

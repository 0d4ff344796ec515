"""The values that describe how a protocol writes a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Item = Mapping[str, Any]
"""A message, an item of Responses, or a content block; of any shape."""
ENCRYPTED = "(encrypted)"
"""Stands for a thought that only the provider can read."""


class Call(NamedTuple):
    """One tool call.

    given: Arguments, a JSON value or JSON as text, depending on the protocol; None without
    arguments. is_json: Whether `given` must be a JSON object; otherwise it is free text or a
    tool-specific shape.
    """

    call_id: str | None
    name: str | None
    given: Any
    is_json: bool


class ToolResult(NamedTuple):
    """The result of a tool call. content: A text or a list of blocks; of any shape."""

    call_id: Any
    content: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How one protocol writes a conversation. A protocol lacks what has a default here.

    Attributes:
        name: As in `Step.protocol`.
        history: Field of a request with its messages or items.
        system: Field of a request with the system prompt, if that is no message.
        prompt: Further fields of a request that make its prompt.
        said: Types of content blocks with words that the model said.
        asked: Types of content blocks with text that the model got.
        server_items: Types of items of the model's side that are neither messages nor calls.
        tool_schema: Field of a tool's definition with the schema of its parameters.
        output: Field of a reply with its list of items; without one, the reply is a message.
        calls: Returns the tool calls of a message or item.
        thoughts: Returns the reasoning in a message or item.
        result: Returns the tool result that an item or block is.
        image: Returns the URL of the image that a block is; often one with the data itself.
    """

    name: str
    history: str | None = None
    system: str | None = None
    prompt: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    server_items: tuple[str, ...] = ()
    tool_schema: str | None = None
    output: str | None = None
    calls: Callable[[Item], Sequence[Call]] | None = None
    thoughts: Callable[[Item], Sequence[str]] | None = None
    result: Callable[[Item], ToolResult | None] | None = None
    image: Callable[[Item], str | None] | None = None


_ARGUMENTS = ("arguments", "input", "action", "operation")


def call_of(call_id: Any, made: Item, is_json: bool) -> Call:
    """Return a call from the object that has its name and arguments."""
    given = next((made[field] for field in _ARGUMENTS if field in made), None)
    name = made.get("name")
    return Call(
        call_id if isinstance(call_id, str) else None,
        name if isinstance(name, str) else None,
        given,
        is_json,
    )


UNREADABLE_CALL = Call(None, None, None, True)
"""Stands for a call of an unknown shape."""


def objects_in(value: Any) -> list[dict[str, Any]]:
    """Return the JSON objects of a list; nothing of another value."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def texts_among(values: Sequence[Any]) -> list[str]:
    """Return the values that are texts and not empty."""
    return [value for value in values if isinstance(value, str) and value]

"""The texts of a recorded request and reply, without the syntax around them. Pure.

Texts are all strings and numbers of the messages, the system prompt, the tools and the reply, in
whatever protocol: contents, reasoning, names, ids, arguments and results of tools. JSON inside a
string, such as the arguments of a tool, is parsed; its names of fields are texts too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clawstream.schemas.conversation import loaded
from clawstream.schemas.conversation.protocols import HISTORY_FIELDS, SYSTEM_FIELDS

_OF_REQUEST = (*SYSTEM_FIELDS, *HISTORY_FIELDS, "prompt", "tools")
_SYNTAX = frozenset({"type", "role"})
"""Fields of messages whose values are names of the protocol."""
_ARGUMENTS = frozenset({"arguments", "input"})
"""Fields of messages whose values are JSON of the conversation."""
_BLOB = "$blob"
_DATA_LENGTH = 1000
"""An ASCII string that is longer and has no space is data, such as an image in base64."""


def texts_of(request_json: str | None, response_json: str | None) -> Iterator[str]:
    """Yield the texts of a step's request and reply; a body that is no JSON is one text.

    The content of a blob has no texts here.
    """
    for body, of_request in ((request_json, True), (response_json, False)):
        if not body:
            continue
        try:
            value = loaded(body)
        except ValueError:
            yield body
            continue
        if isinstance(value, dict) and _BLOB in value:
            continue
        if of_request and isinstance(value, dict):
            value = [value[name] for name in _OF_REQUEST if name in value]
        yield from _texts_in(value)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value. Iterates: a value may be nested deeply."""
    left = [(value, False)]  # a value, and whether its names of fields are texts
    while left:
        value, named = left.pop()
        if isinstance(value, str):
            if value[:1] in ("{", "[") and (inner := _parsed(value)) is not None:
                left.append((inner, True))
            elif len(value) <= _DATA_LENGTH or " " in value or not value.isascii():
                yield value
        elif isinstance(value, dict):
            for name, inner in value.items():
                if named:
                    yield name
                    left.append((inner, True))
                elif name not in _SYNTAX:
                    left.append((inner, name in _ARGUMENTS))
        elif isinstance(value, list):
            left.extend((inner, named) for inner in value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield str(value)


def _parsed(text: str) -> Any | None:
    try:
        return loaded(text)
    except ValueError:
        return None

"""A recorded request of any protocol, parsed once. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from clawstream.schemas.conversation.parsing import loaded
from clawstream.schemas.conversation.protocols import HISTORY_FIELDS


class RecordedRequest:
    """The request of a step.

    Its JSON is parsed on first use, and only then: many steps need nothing of it. Pass the object
    on instead of the bytes.
    """

    def __init__(self, body: bytes) -> None:
        self.body = body

    @cached_property
    def fields(self) -> Mapping[str, Any] | None:
        """The JSON object; None if the body is none."""
        try:
            parsed = loaded(self.body)
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None

    @cached_property
    def history(self) -> list[Any] | None:
        """Its messages or items, of any shape; None if it has none."""
        return None if self.fields is None else history_of(self.fields)


def history_of(fields: Mapping[str, Any]) -> list[Any] | None:
    """Return the messages or items of a request, oldest first; None if it has none.

    A text in place of messages is one message of the user.
    """
    for field in HISTORY_FIELDS:
        history = fields.get(field)
        if isinstance(history, list):
            return history
        if isinstance(history, str):
            return [{"role": "user", "content": history}]
    return None

"""A streamed reply as the message that the same reply would be without a stream. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]


class StreamedMessage:
    """Joins the chunks of a reply of one choice.

    Attributes:
        finish_reason: of the reply; None while it goes on.
    """

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._fields: Message = {"role": "assistant"}
        self._calls: dict[int, Message] = {}

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add a choice of a chunk, as JSON: {"delta", "finish_reason"?}."""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for part in value or ():
                    _join(self._calls.setdefault(part["index"], {}), part)
            elif name != "function_call":  # deprecated, as in a reply without a stream
                _join(self._fields, {name: value})

    @property
    def message(self) -> Message:
        """The message so far."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        if not calls:
            return dict(self._fields)
        # A stream may begin with an empty content, which a plain reply of calls does not have.
        fields = {name: value for name, value in self._fields.items() if value != ""}
        return {**fields, "tool_calls": calls}


def _join(whole: Message, part: Mapping[str, Any]) -> None:
    """Append texts and lists; set other values. `index` is of the stream only."""
    for name, value in part.items():
        if name == "index" or value is None:
            continue
        before = whole.get(name)
        if isinstance(value, Mapping):
            _join(whole.setdefault(name, {}), value)
        elif before is None or name in ("id", "type", "role"):
            whole[name] = before or value
        else:
            whole[name] = before + value if isinstance(value, str | list) else value

"""Merges stream deltas into one message by the rules of OpenAI's official clients. Pure.

The rules are those of `accumulate_delta` in openai-python, so the record equals the message that
the agent has: strings are concatenated, numbers added, objects merged by key, and list entries
merged by their `index`. `type`, `index` and, as in openai-node, `id`, `name` and `role` are labels:
a later value replaces an earlier one, because some providers repeat them in each chunk.

openai-python raises an error or drops a delta when a list entry has no `index`, or when one field
gets both text and a list. This module keeps both: such entries are appended, and the text becomes
a block `{"type": "text"}` of the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Pieces:
    """A text in pieces, joined by `joined`: adding piece after piece would copy it each time."""

    __slots__ = ("texts",)

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def __str__(self) -> str:
        return "".join(self.texts)


LABELS = frozenset({"type", "index", "id", "name", "role"})
GROWING = frozenset({"text", "output_text", "thinking", "reasoning.text", "reasoning.summary"})
"""Types of blocks without an index that the next chunk continues."""
MAX_OPEN = 64
"""Number of last list entries that are searched for an index."""


def grow(whole: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Merge a delta into an object, in place."""
    for name, piece in delta.items():
        before = whole.get(name)
        if before is None:
            whole[name] = begun(piece)
        elif name not in LABELS:
            whole[name] = grown(before, piece)
        elif piece or piece == 0:
            whole[name] = piece


def begun(piece: Any) -> Any:
    """Return a field's value after its first delta.

    One list may hold several deltas of the same entry.
    """
    if isinstance(piece, list):
        whole: list[Any] = []
        _extend(whole, piece)
        return whole
    return piece


def grown(before: Any, piece: Any) -> Any:
    """Return a field's value after another delta. May change `before` in place."""
    match before, piece:
        case (Pieces(), str()):
            before.texts.append(piece)
            return before
        case (str(), str()):
            return Pieces(before, piece) if before and piece else before or piece
        case (Pieces(), _):
            return grown(str(before), piece)
        case (dict(), dict()):
            grow(before, piece)
        case (list(), list()):
            _extend(before, piece)
        case (list(), str()):
            if piece:
                _extend(before, [{"type": "text", "text": piece}])
        case (str(), list() | dict()) if not before:
            return begun(piece)
        case (str(), list()):
            return grown([{"type": "text", "text": before}], piece)
        case (bool(), bool()):
            return piece
        case (int() | float(), int() | float()):
            return before + piece
    return before


def joined(whole: Any) -> Any:
    """Join the texts of a merged value, in place where it is an object or list."""
    if isinstance(whole, Pieces):
        return str(whole)
    waiting = [whole]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict):
            for name, value in holder.items():
                if isinstance(value, Pieces):
                    holder[name] = str(value)
                elif isinstance(value, dict | list):
                    waiting.append(value)
        elif isinstance(holder, list):
            waiting += [value for value in holder if isinstance(value, dict | list)]
    return whole


def _extend(whole: list[Any], pieces: list[Any]) -> None:
    goes_on = bool(whole)
    for piece in pieces:
        index = piece.get("index") if isinstance(piece, dict) else None
        if isinstance(index, int):
            entry = next(
                (
                    e
                    for e in whole[: -MAX_OPEN - 1 : -1]
                    if isinstance(e, dict) and e.get("index") == index
                ),
                None,
            )
        else:
            entry = whole[-1] if goes_on and _continues(whole[-1], piece) else None
        if entry is None:
            whole.append(piece)
        else:
            grow(entry, piece)
        goes_on = False


def _continues(last: Any, piece: Any) -> bool:
    """Tell whether `piece` continues the last entry of a list."""
    if not isinstance(last, dict) or not isinstance(piece, dict):
        return False
    return last.get("type") in GROWING and last.get("type") == piece.get("type")

"""JSON bodies without their secrets. Pure.

Strings with a secret are read and written again, JSON inside of them too (the arguments of a tool call), so a body stays what its
protocol says. Everything else stays byte for byte as it was. A number that is a secret becomes a string.
"""

from __future__ import annotations

import json
import re

import orjson

from gateway.redaction.scan import Scan

_QUOTE = b'"'
_COLON = re.compile(rb"\s*+:\s*+")
_NUMBER = re.compile(rb"(?<![\w.+-])[0-9]{6,}+(?![.eE])")
_BLANKS = b" \t\r\n"


def redacted_body(raw: bytes, scan: Scan) -> bytes:
    """A JSON text without its secrets; the same object when it has none. What is no JSON is read as text."""
    anchors = scan.json_anchors(raw)
    if not scan.finders and not anchors:
        return raw
    return _Body(raw, scan, anchors).redacted() if _is_json(raw) else scan.text(raw)


def _is_json(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


class _Body:
    """One JSON text. JSON in JSON in JSON is no deeper than the logarithm of its length: each level doubles the backslashes.

    Only strings and numbers with an anchor in them, or in the name of their member, are looked at; all of them when there are rules
    without anchors.
    """

    def __init__(self, raw: bytes, scan: Scan, anchors: list[int]) -> None:
        self._raw, self._scan = raw, scan
        self._quotes = raw.replace(b"\\\\", b"__").replace(
            b'\\"', b"__"
        )  # as long as raw, and each quote in it ends or begins a string
        if scan.finders:
            begins = [found.end() for found in re.finditer(_QUOTE, self._quotes)][::2]
            anchors = sorted({*anchors, *begins})
        self._anchors = anchors
        self._pieces: list[bytes] = []
        self._written = 0

    def redacted(self) -> bytes:
        quotes = self._quotes
        read = 0  # everything before it is done, and it is outside of strings
        for at in self._anchors:
            if at < read:
                continue
            if quotes.count(_QUOTE, read, at) % 2 == 0:
                read = max(at, self._number(at, None))
                continue
            start, end = quotes.rfind(_QUOTE, read, at), quotes.index(_QUOTE, at)
            colon = _COLON.match(self._raw, end + 1)
            if colon is None:
                self._string(start, end, self._name_before(start))
                read = end + 1
            else:
                read = self._member(start, end, colon.end())
        return b"".join((*self._pieces, self._raw[self._written :])) if self._pieces else self._raw

    def _member(self, start: int, end: int, value: int) -> int:
        """The name between quotes at `start` and `end`, and its value when that is no container. Where the latter ends."""
        name = _unescaped(self._raw[start + 1 : end])
        self._string(start, end, None)
        if self._raw[value : value + 1] == _QUOTE:
            last = self._quotes.index(_QUOTE, value + 1)
            self._string(value, last, name)
            return last + 1
        return self._number(value, name)

    def _name_before(self, start: int) -> bytes | None:
        """The name of the member whose value begins at `start`; None in a list."""
        colon = start - 1
        while self._raw[colon : colon + 1] in (b" ", b"\t", b"\r", b"\n"):
            colon -= 1
        if self._raw[colon : colon + 1] != b":":
            return None
        end = self._quotes.rfind(_QUOTE, 0, colon)
        return _unescaped(self._raw[self._quotes.rfind(_QUOTE, 0, end) + 1 : end])

    def _string(self, start: int, end: int, name: bytes | None) -> None:
        """The string between quotes at `start` and `end`."""
        value = _unescaped(self._raw[start + 1 : end])
        whole = None if name is None else self._scan.member(name, value, True)
        if whole is None and value.lstrip(_BLANKS)[:1] in (b"{", b"[") and _is_json(value):
            new = _Body(value, self._scan, self._scan.json_anchors(value)).redacted()
        else:
            new = self._scan.text(value, whole)
        if new is not value:
            self._write(start + 1, end, _escaped(new))

    def _number(self, at: int, name: bytes | None) -> int:
        """The number that begins at `at`, if one does. Where it ends."""
        found = _NUMBER.match(self._raw, at)
        if found is None:
            return at
        digits = found[0]
        whole = None if name is None else self._scan.member(name, digits, False)
        new = self._scan.text(digits, whole)
        if new is not digits:
            self._write(at, found.end(), b'"' + _escaped(new) + b'"')
        return found.end()

    def _write(self, start: int, end: int, new: bytes) -> None:
        self._pieces += (self._raw[self._written : start], new)
        self._written = end


def _unescaped(literal: bytes) -> bytes:
    """What a JSON string says. UTF-8; half of a surrogate pair, which JSON allows, in three bytes."""
    if b"\\" not in literal:
        return literal
    said: str = json.loads(b'"' + literal + b'"', strict=False)
    return said.encode("utf-8", "surrogatepass")


def _escaped(value: bytes) -> bytes:
    said = value.decode("utf-8", "surrogatepass")
    try:
        return json.dumps(said, ensure_ascii=False)[1:-1].encode()
    except UnicodeEncodeError:
        return json.dumps(said)[1:-1].encode()

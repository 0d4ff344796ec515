"""Redacts JSON bodies. Pure.

Strings with a secret are decoded, redacted and encoded again, including JSON inside strings (tool
call arguments), so the body remains valid. All other bytes stay unchanged. A number that is a
secret becomes a string.
"""

from __future__ import annotations

import json
import re

import orjson

from clawstream.gateway.redaction.scan import Scan

_QUOTE = b'"'
_COLON = re.compile(rb"\s*+:\s*+")
_NUMBER = re.compile(rb"(?<![\w.+-])[0-9]{6,}+(?![.eE])")
_BLANKS = b" \t\r\n"


def redacted_body(raw: bytes, scan: Scan) -> bytes:
    """Redact a JSON text; returns `raw` itself without secrets. Other data is redacted as text."""
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
    """Redacts one JSON text.

    Checks only strings and numbers with an anchor in the value or the member name; all of them when
    there are rules without anchors. The depth of JSON nested in strings is at most the logarithm of
    the length, because each level doubles the backslashes.
    """

    def __init__(self, raw: bytes, scan: Scan, anchors: list[int]) -> None:
        self._raw, self._scan = raw, scan
        # As long as raw; each quote in it starts or ends a string.
        self._quotes = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if scan.finders:
            begins = [found.end() for found in re.finditer(_QUOTE, self._quotes)][::2]
            anchors = sorted({*anchors, *begins})
        self._anchors = anchors
        self._pieces: list[bytes] = []
        self._written = 0

    def redacted(self) -> bytes:
        quotes = self._quotes
        read = 0  # all bytes before it are done; outside of strings
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
        """Redact a member name and its scalar value; return the end of the value."""
        name = _unescaped(self._raw[start + 1 : end])
        self._string(start, end, None)
        if self._raw[value : value + 1] == _QUOTE:
            last = self._quotes.index(_QUOTE, value + 1)
            self._string(value, last, name)
            return last + 1
        return self._number(value, name)

    def _name_before(self, start: int) -> bytes | None:
        """Return the name of the member whose value starts at `start`; None in a list."""
        colon = start - 1
        while self._raw[colon : colon + 1] in (b" ", b"\t", b"\r", b"\n"):
            colon -= 1
        if self._raw[colon : colon + 1] != b":":
            return None
        end = self._quotes.rfind(_QUOTE, 0, colon)
        return _unescaped(self._raw[self._quotes.rfind(_QUOTE, 0, end) + 1 : end])

    def _string(self, start: int, end: int, name: bytes | None) -> None:
        """Redact the string between the quotes at `start` and `end`."""
        value = _unescaped(self._raw[start + 1 : end])
        whole = None if name is None else self._scan.member(name, value, True)
        if whole is None and value.lstrip(_BLANKS)[:1] in (b"{", b"[") and _is_json(value):
            new = _Body(value, self._scan, self._scan.json_anchors(value)).redacted()
        else:
            new = self._scan.text(value, whole)
        if new is not value:
            self._write(start + 1, end, _escaped(new))

    def _number(self, at: int, name: bytes | None) -> int:
        """Redact the number at `at`, if any; return its end."""
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
    """Decode a JSON string to UTF-8; a lone surrogate becomes three bytes."""
    if b"\\" not in literal:
        return literal
    decoded: str = json.loads(b'"' + literal + b'"', strict=False)
    return decoded.encode("utf-8", "surrogatepass")


def _escaped(value: bytes) -> bytes:
    text = value.decode("utf-8", "surrogatepass")
    try:
        return json.dumps(text, ensure_ascii=False)[1:-1].encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1].encode()

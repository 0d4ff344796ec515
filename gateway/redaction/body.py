"""JSON bodies without their secrets. Pure.

The values of strings are read and written again, JSON inside of them too (the arguments of a tool call), so a body stays what its
protocol says. Everything else stays byte for byte as it was. A number that is a secret becomes a string.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left

import orjson

from gateway.redaction.scan import Scan

_TOKEN = re.compile(rb'"((?:[^"\\]++|\\.)*+)("?)(\s*+:\s*+)?|(?<![\w.+-])-?[0-9]++(?![.0-9eE])', re.S)
_SHORTEST_NUMBER = 6


def redacted_body(raw: bytes, scan: Scan) -> bytes:
    """A JSON text without its secrets; the same object when it has none. What is no JSON is read as text."""
    if not scan.finders and not scan.anchors(raw):
        return raw
    return _Body(raw, scan).redacted() if _is_json(raw) else scan.text(raw)


def _is_json(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


class _Body:
    """One JSON text. JSON in JSON in JSON is no deeper than the logarithm of its length: each level doubles the backslashes."""

    def __init__(self, raw: bytes, scan: Scan) -> None:
        self._raw, self._scan = raw, scan
        self._anchors = scan.anchors(raw)
        self._name, self._name_start, self._name_end = b"", -1, -1

    def redacted(self) -> bytes:
        raw = self._raw
        pieces: list[bytes] = []
        at = 0
        for found in _TOKEN.finditer(raw):
            new = self._string(found) if found[0][:1] == b'"' else self._number(found)
            if new is not None:
                start, end = found.span(1) if found[1] is not None else found.span()
                pieces += (raw[at:start], new)
                at = end
        return b"".join((*pieces, raw[at:])) if pieces else raw

    def _string(self, found: re.Match[bytes]) -> bytes | None:
        """What stands between the quotes from now on; None: it stays."""
        is_name, start = found[3] is not None, found.start()
        named = start == self._name_end
        first = self._name_start if named else start
        value = None
        if self._scan.finders or is_name or self._anchored(first, found.end()):
            value = _unescaped(found[1])
        if is_name:
            self._name, self._name_start, self._name_end = value or b"", start, found.end()
            if not self._anchored(start, found.end()) and not self._scan.finders:
                return None
        if value is None:
            return None
        whole = self._scan.member(self._name, value, True) if named else None
        new = self._value(value, whole)
        return None if new is value else _escaped(new)

    def _value(self, value: bytes, whole: int | None) -> bytes:
        if whole is None and value.lstrip()[:1] in (b"{", b"[") and _is_json(value):
            return _Body(value, self._scan).redacted()
        return self._scan.text(value, whole)

    def _number(self, found: re.Match[bytes]) -> bytes | None:
        named, digits = found.start() == self._name_end, found[0]
        first = self._name_start if named else found.start()
        if len(digits) < _SHORTEST_NUMBER or not (self._scan.finders or self._anchored(first, found.end())):
            return None
        whole = self._scan.member(self._name, digits, False) if named else None
        new = self._scan.text(digits, whole)
        return None if new is digits else b'"' + _escaped(new) + b'"'

    def _anchored(self, start: int, end: int) -> bool:
        at = bisect_left(self._anchors, start)
        return at < len(self._anchors) and self._anchors[at] < end


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

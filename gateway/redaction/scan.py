"""Finds and replaces secrets in text. Pure. The only module that imports ahocorasick_rs.

One pass of an Aho-Corasick automaton over the normal form of the text finds the anchors of all
rules; each rule then searches around its anchors. A text without anchors, the usual case, costs
one pass.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from clawstream.gateway.redaction.rules import NORMAL, Rule

Finder = Callable[[str], Iterable[tuple[int, int]]]
"""User-defined rule: maps a text to the character ranges of its secrets. Must be pure."""
Style = Literal["hashed", "plain"]

ESCAPE = b"\\u000"
"""Normal form of a JSON escape that may encode an ASCII character."""
_SLICE_BYTES = 1 << 16
_SUFFIX_BYTES = 4


class WrongRange(ValueError):
    """A rule returned a range outside of its text."""


class SecretSpan(NamedTuple):
    """A secret at bytes [start, end).

    rank: Index of its rule; of overlapping secrets, the lowest rank gives the label.
    """

    start: int
    end: int
    rank: int


@dataclass(frozen=True, slots=True)
class NamedFinder:
    """A user-defined rule and its name."""

    name: str
    find: Finder


class Scan:
    """Compiled rules.

    key: Secret bytes; the same key gives the same replacements.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        key: bytes,
        style: Style = "hashed",
        finders: Sequence[NamedFinder] = (),
    ) -> None:
        import ahocorasick_rs  # loaded only when redaction is on

        self.rules, self.finders = tuple(rules), tuple(finders)
        self._key, self._style = key, style
        by_anchor: dict[bytes, list[int]] = {ESCAPE: []}
        for rank, rule in enumerate(self.rules):
            for anchor in rule.anchors:
                by_anchor.setdefault(anchor, []).append(rank)
        self._ranks = tuple(tuple(ranks) for ranks in by_anchor.values())
        self._overlap = max(map(len, by_anchor)) - 1
        self._automaton = ahocorasick_rs.BytesAhoCorasick(
            by_anchor, implementation=ahocorasick_rs.Implementation.DFA
        )
        self._labels = [r.name.upper() for r in self.rules] + [f.name.upper() for f in self.finders]
        self._keyed = [
            (rank, rule.key) for rank, rule in enumerate(self.rules) if rule.key is not None
        ]

    def anchors(self, text: bytes) -> list[int]:
        """Return the positions of anchors, ascending.

        Every secret of a built-in rule has an anchor within or next to its range.
        """
        hits = self._hits(text)
        return sorted(at for at, ranks in hits if ranks) if hits else []

    def json_anchors(self, raw: bytes) -> list[int]:
        """Return the positions in JSON of anchors that may belong to a secret, ascending."""
        found = []
        for at, ranks in self._hits(raw):
            if not ranks:
                if raw.startswith(b"00", at + 2):
                    found.append(at)
            elif any(
                (check := self.rules[rank].in_json) is None or check(raw, at) for rank in ranks
            ):
                found.append(at)
        found.sort()
        return found

    def find(self, text: bytes, whole: int | None = None) -> list[SecretSpan]:
        """Find the secrets of a text, ascending and disjoint.

        whole: Rank of the rule by which the whole text is a secret, if any.
        """
        found = [] if whole is None else [SecretSpan(0, len(text), whole)]
        done = [0] * len(self.rules)
        for at, ranks in self._hits(text):
            for rank in ranks:
                if at >= done[rank] and (span := self.rules[rank].find(text, at)) is not None:
                    found.append(SecretSpan(*span, rank))
                    done[rank] = span[1]
        for rank, finder in enumerate(self.finders, len(self.rules)):
            found += [SecretSpan(*span, rank) for span in _byte_spans(text, finder)]
        return _merge_overlaps(found)

    def member(self, name: bytes, value: bytes, quoted: bool) -> int | None:
        """Return the rank of the rule that makes a JSON member's value secret by its name."""
        return next((rank for rank, key in self._keyed if key(name, value, quoted)), None)

    def replacement(self, text: bytes, found: SecretSpan) -> bytes:
        """Return the replacement of a secret; equal secrets get equal replacements."""
        label = self._labels[found.rank]
        if self._style == "plain":
            return f"[REDACTED:{label}]".encode()
        value = text[found.start : found.end]
        same = self.rules[found.rank].same(value) if found.rank < len(self.rules) else value
        suffix = hmac.digest(self._key, same, hashlib.sha256)[:_SUFFIX_BYTES].hex()
        return f"[REDACTED:{label}:{suffix}]".encode()

    def text(self, text: bytes, whole: int | None = None) -> bytes:
        """Redact a text; returns `text` itself without secrets."""
        found = self.find(text, whole)
        if not found:
            return text
        pieces: list[bytes] = []
        at = 0
        for one in found:
            pieces += (text[at : one.start], self.replacement(text, one))
            at = one.end
        return b"".join((*pieces, text[at:]))

    def _hits(self, text: bytes) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Return anchors with the ranks of their rules, ordered by end position."""
        if len(text) > _SLICE_BYTES:
            return self._sliced_hits(text)
        ranks, found = (
            self._ranks,
            self._automaton.find_matches_as_indexes(text.translate(NORMAL), overlapping=True),
        )
        return [(start, ranks[which]) for which, start, _ in found] if found else ()

    def _sliced_hits(self, text: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Scan a large text in slices, because its number of anchors is unbounded."""
        for begin in range(0, len(text), _SLICE_BYTES):
            normal = text[begin : begin + _SLICE_BYTES + self._overlap].translate(NORMAL)
            for which, start, _ in self._automaton.find_matches_as_indexes(
                normal, overlapping=True
            ):
                if start < _SLICE_BYTES:
                    yield begin + start, self._ranks[which]


def _merge_overlaps(found: list[SecretSpan]) -> list[SecretSpan]:
    """Merge overlapping secrets, so that the result does not depend on the order of rules."""
    if len(found) < 2:
        return found
    found.sort()
    out = [found[0]]
    for one in found[1:]:
        last = out[-1]
        if one.start < last.end:
            out[-1] = SecretSpan(last.start, max(last.end, one.end), min(last.rank, one.rank))
        else:
            out.append(one)
    return out


def _byte_spans(text: bytes, finder: NamedFinder) -> Iterator[tuple[int, int]]:
    """Return the byte spans that a finder found. Raises WrongRange and the finder's errors."""
    characters = text.decode("utf-8", "surrogateescape")
    for start, end in finder.find(characters):
        if not 0 <= start < end <= len(characters):
            raise WrongRange(f"{finder.name}: [{start}, {end}) of {len(characters)} characters")
        first = len(characters[:start].encode("utf-8", "surrogateescape"))
        yield first, first + len(characters[start:end].encode("utf-8", "surrogateescape"))

"""Finds the secrets of a text, and what stands in their place. Pure. The only file that imports ahocorasick_rs.

One pass of an Aho-Corasick automaton over the text's normal form finds the anchors of all rules; around each anchor its rule looks
closer. A text without an anchor, nearly every one, costs that pass only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gateway.redaction.rules import NORMAL, Rule

Finder = Callable[[str], Iterable[tuple[int, int]]]
"""A rule of somebody else's: from a text to the ranges of its characters that are secret. Pure, and the same for the same text."""
Style = Literal["hashed", "plain"]

ESCAPE = b"\\u000"
"""Normal form of a JSON escape that may hide an ASCII character."""
_SLICE_BYTES = 1 << 16
_SUFFIX_BYTES = 4


class WrongRange(ValueError):
    """A rule named a range that its text does not have."""


class Found(NamedTuple):
    """Bytes [start, end) of a text are a secret; rank: place of its kind among the rules, the lower one gives the label."""

    start: int
    end: int
    rank: int


@dataclass(frozen=True, slots=True)
class Named:
    """A rule of somebody else's and its name."""

    name: str
    find: Finder


class Scan:
    """Rules, ready to use. key: bytes that an attacker does not know; the same key gives the same replacements."""

    def __init__(
        self,
        rules: Sequence[Rule],
        key: bytes,
        style: Style = "hashed",
        finders: Sequence[Named] = (),
    ) -> None:
        import ahocorasick_rs  # only who redacts needs it

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
        """Where anchors begin, ascending. No secret is without one in its range or a few bytes around it, but for those of finders."""
        hits = self._hits(text)
        return sorted(at for at, ranks in hits if ranks) if hits else []

    def json_anchors(self, raw: bytes) -> list[int]:
        """Where a JSON text has anchors that may be those of a secret in a string of it, hidden characters among them; ascending."""
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

    def find(self, text: bytes, whole: int | None = None) -> list[Found]:
        """The secrets of a text, apart from each other, ascending. whole: all of it is a secret of the rule of this rank."""
        found = [] if whole is None else [Found(0, len(text), whole)]
        done = [0] * len(self.rules)
        for at, ranks in self._hits(text):
            for rank in ranks:
                if at >= done[rank] and (span := self.rules[rank].find(text, at)) is not None:
                    found.append(Found(*span, rank))
                    done[rank] = span[1]
        for rank, finder in enumerate(self.finders, len(self.rules)):
            found += [Found(*span, rank) for span in _byte_spans(text, finder)]
        return _apart(found)

    def member(self, name: bytes, value: bytes, quoted: bool) -> int | None:
        """The rule by which the value of a JSON member is a secret because of the member's name."""
        return next((rank for rank, key in self._keyed if key(name, value, quoted)), None)

    def replacement(self, text: bytes, found: Found) -> bytes:
        """What stands for a secret. The same for the same secret, whatever it stood in."""
        label = self._labels[found.rank]
        if self._style == "plain":
            return f"[REDACTED:{label}]".encode()
        value = text[found.start : found.end]
        same = self.rules[found.rank].same(value) if found.rank < len(self.rules) else value
        return f"[REDACTED:{label}:{hmac.digest(self._key, same, hashlib.sha256)[:_SUFFIX_BYTES].hex()}]".encode()

    def text(self, text: bytes, whole: int | None = None) -> bytes:
        """The text without its secrets; the same object when it has none."""
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
        """Anchors and the ranks of their rules, by end."""
        if len(text) > _SLICE_BYTES:
            return self._sliced_hits(text)
        ranks, found = (
            self._ranks,
            self._automaton.find_matches_as_indexes(text.translate(NORMAL), overlapping=True),
        )
        return [(start, ranks[which]) for which, start, _ in found] if found else ()

    def _sliced_hits(self, text: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
        """A large text in slices: how many anchors it has is up to who wrote it."""
        for begin in range(0, len(text), _SLICE_BYTES):
            normal = text[begin : begin + _SLICE_BYTES + self._overlap].translate(NORMAL)
            for which, start, _ in self._automaton.find_matches_as_indexes(
                normal, overlapping=True
            ):
                if start < _SLICE_BYTES:
                    yield begin + start, self._ranks[which]


def _apart(found: list[Found]) -> list[Found]:
    """Those that overlap become one: nothing that a rule calls a secret stays, and the text after it is the same in any order."""
    if len(found) < 2:
        return found
    found.sort()
    out = [found[0]]
    for one in found[1:]:
        last = out[-1]
        if one.start < last.end:
            out[-1] = Found(last.start, max(last.end, one.end), min(last.rank, one.rank))
        else:
            out.append(one)
    return out


def _byte_spans(text: bytes, finder: Named) -> Iterator[tuple[int, int]]:
    """What a finder found, in bytes. Raises WrongRange, and whatever it raises."""
    characters = text.decode("utf-8", "surrogateescape")
    for start, end in finder.find(characters):
        if not 0 <= start < end <= len(characters):
            raise WrongRange(f"{finder.name}: [{start}, {end}) of {len(characters)} characters")
        first = len(characters[:start].encode("utf-8", "surrogateescape"))
        yield first, first + len(characters[start:end].encode("utf-8", "surrogateescape"))

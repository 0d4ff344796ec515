"""Redacts token ids. Pure.

Prompt and response form one sequence, split at special tokens; a secret lies between two of them.
The redaction of a turn therefore depends only on that turn: a prompt that starts with an earlier
step's prompt and response still does after redaction. (Exception: with a template without special
tokens, a secret may continue into the next turn. The next step then starts a new branch.)

Every token with a byte of a secret is removed. The encoding of the replacement, and of the other
bytes of these tokens, takes their place. A secret that spans prompt and response is replaced in the
response.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from clawstream.gateway.redaction.scan import Scan, SecretSpan
from clawstream.gateway.redaction.vocabulary import Vocabulary
from clawstream.schemas.records import TokenSpan, VersionSpan
from clawstream.schemas.tokens import pack_ids, unpack_ids

WIDTH = 4
ABSENT = struct.pack("<f", float("nan"))
"""Missing log-probability: NaN, so that no computed value looks valid."""


class InconsistentTokens(ValueError):
    """Ids and log-probabilities of a step have different lengths."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces tokens [start, end) of a sequence with `ids`."""

    start: int
    end: int
    ids: tuple[int, ...]


def edits_of(packed: bytes, vocabulary: Vocabulary, scan: Scan) -> list[Edit]:
    """Return the edits of packed ids, ascending and disjoint. Raises UnknownToken."""
    pieces, text = vocabulary.spell(packed)
    anchors = scan.anchors(text)
    if not anchors and not scan.finders:
        return []
    ids = unpack_ids(packed)
    ends = list(accumulate(map(len, pieces)))
    borders = [-1, *_special_positions(ids, vocabulary.special), len(ids)]
    edits: list[Edit] = []
    for before, after in pairwise(borders):
        first, last = before + 1, after
        if first == last:
            continue
        begin, end = ends[first] - len(pieces[first]), ends[last - 1]
        if scan.finders or bisect_left(anchors, begin) < bisect_left(anchors, end):
            edits += _edits_between(
                first, text[begin:end], [e - begin for e in ends[first:last]], vocabulary, scan
            )
    return edits


def _special_positions(ids: Sequence[int], special: frozenset[int]) -> list[int]:
    """Return the positions of special tokens, ascending."""
    places: list[int] = []
    for number in special.intersection(ids):
        at = -1
        for _ in range(ids.count(number)):
            at = ids.index(number, at + 1)
            places.append(at)
    return sorted(places)


def _edits_between(
    first: int, text: bytes, ends: Sequence[int], vocabulary: Vocabulary, scan: Scan
) -> Iterable[Edit]:
    """Return the edits of the tokens that spell `text`.

    first: Index of the first token. ends: End of each token in `text`, in bytes.
    """
    groups: list[tuple[int, int, list[SecretSpan]]] = []
    for found in scan.find(text):
        start, end = _whole_tokens(
            text, ends, bisect_right(ends, found.start), bisect_left(ends, found.end) + 1
        )
        if groups and start < groups[-1][1]:
            earlier = groups.pop()
            groups.append((earlier[0], max(earlier[1], end), [*earlier[2], found]))
        else:
            groups.append((start, end, [found]))
    for start, end, secrets in groups:
        at = ends[start - 1] if start else 0
        shown: list[bytes] = []
        for found in secrets:
            shown += (text[at : found.start], scan.replacement(text, found))
            at = found.end
        new = vocabulary.encode(b"".join((*shown, text[at : ends[end - 1]])))
        yield Edit(first + start, first + end, tuple(new))


def _whole_tokens(text: bytes, ends: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """Extend tokens [start, end) until no character is split."""
    while start and _continues(text, ends[start - 1]):
        start -= 1
    while end < len(ends) and _continues(text, ends[end - 1]):
        end += 1
    return start, end


def _continues(text: bytes, at: int) -> bool:
    return at < len(text) and text[at] & 0xC0 == 0x80


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a step, packed as in `Step`; spans use indexes after redaction."""

    prompt: bytes | None
    response: bytes | None
    logprobs: bytes | None
    versions: tuple[VersionSpan, ...]
    redacted_prompt: tuple[TokenSpan, ...] = ()
    redacted_response: tuple[TokenSpan, ...] = ()


def redacted_tokens(tokens: Tokens, vocabulary: Vocabulary, scan: Scan) -> Tokens:
    """Redact the tokens of a step; returns `tokens` itself without secrets.

    The log-probability of a redacted token is `ABSENT`.

    Raises:
        UnknownToken, InconsistentTokens: The tokens cannot be read.
    """
    prompt, response = tokens.prompt or b"", tokens.response or b""
    if len(prompt) % WIDTH or len(response) % WIDTH:
        raise InconsistentTokens(
            f"{len(prompt)} and {len(response)} bytes of ids are not a whole number of ids"
        )
    if tokens.logprobs is not None and len(tokens.logprobs) != len(response):
        raise InconsistentTokens(
            f"{len(tokens.logprobs)} bytes of log-probabilities for {len(response)} bytes of ids"
        )
    edits = edits_of(prompt + response, vocabulary, scan)
    if not edits:
        return tokens
    border = len(prompt) // WIDTH
    before = [e for e in edits if e.end <= border]
    after = [Edit(max(0, e.start - border), e.end - border, e.ids) for e in edits if e.end > border]
    spanning = next((e for e in edits if e.start < border < e.end), None)
    kept = prompt if spanning is None else prompt[: spanning.start * WIDTH]
    return Tokens(
        None if tokens.prompt is None else _edited_ids(kept, before),
        None if tokens.response is None else _edited_ids(response, after),
        None
        if tokens.logprobs is None
        else _edited(tokens.logprobs, after, [ABSENT * len(e.ids) for e in after]),
        _shifted(tokens.versions, after),
        _spans(before),
        _spans(after),
    )


def _edited_ids(packed: bytes, edits: Sequence[Edit]) -> bytes:
    return _edited(packed, edits, [pack_ids(e.ids) for e in edits])


def _edited(packed: bytes, edits: Sequence[Edit], new: Sequence[bytes]) -> bytes:
    pieces: list[bytes] = []
    at = 0
    for edit, instead in zip(edits, new, strict=True):
        pieces += (packed[at : edit.start * WIDTH], instead)
        at = edit.end * WIDTH
    return b"".join((*pieces, packed[at:]))


def _spans(edits: Iterable[Edit]) -> tuple[TokenSpan, ...]:
    spans, shift = [], 0
    for edit in edits:
        start = edit.start + shift
        spans.append(TokenSpan(start=start, end=start + len(edit.ids)))
        shift += len(edit.ids) - (edit.end - edit.start)
    return tuple(spans)


def _shifted(versions: Sequence[VersionSpan], edits: Sequence[Edit]) -> tuple[VersionSpan, ...]:
    """Convert version spans to the new indexes.

    A replacement belongs to the version of the first token that it replaces.
    """

    def to(index: int) -> int:
        shift = 0
        for edit in edits:
            if index <= edit.start:
                break
            if index < edit.end:
                return edit.start + shift + len(edit.ids)
            shift += len(edit.ids) - (edit.end - edit.start)
        return index + shift

    moved = (VersionSpan(version=v.version, start=to(v.start), end=to(v.end)) for v in versions)
    return tuple(v for v in moved if v.start < v.end)

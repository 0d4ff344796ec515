"""Token ids without the secrets that they spell. Pure.

Prompt and response are one sequence, cut at special tokens; a secret lies between two of them. So what becomes of a turn depends on
nothing outside of it: when a prompt begins with an earlier step's prompt and response, it still does afterwards. (Not so where a
template without special tokens lets the next turn go on in the middle of a secret: then the next step begins a branch of its own.)

A token that shows any byte of a secret goes. In place of those that go stands the encoding of the replacement and of what else they
showed. A secret that reaches from the prompt into the response is replaced in the response.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gateway.redaction.scan import Found, Scan
from gateway.redaction.vocabulary import Vocabulary
from schemas.records import TokenSpan, VersionSpan
from schemas.tokens import pack_ids, unpack_ids

WIDTH = 4
ABSENT = struct.pack("<f", float("nan"))
"""In place of a log-probability where there is none: not a number, so nothing computed from it passes for one."""


class TokensDisagree(ValueError):
    """Ids and log-probabilities of a step do not fit together."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Tokens [start, end) of a sequence become `ids`."""

    start: int
    end: int
    ids: tuple[int, ...]


def edits_of(packed: bytes, vocabulary: Vocabulary, scan: Scan) -> list[Edit]:
    """What has to change in a sequence of packed ids, ascending and apart. Raises UnknownToken."""
    pieces, text = vocabulary.spell(packed)
    anchors = scan.anchors(text)
    if not anchors and not scan.finders:
        return []
    ids = unpack_ids(packed)
    ends = list(accumulate(map(len, pieces)))
    borders = [-1, *_places(ids, vocabulary.special), len(ids)]
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


def _places(ids: Sequence[int], special: frozenset[int]) -> list[int]:
    """Where special tokens are, ascending."""
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
    """Edits of the tokens that spell `text`, the first of which has index `first`. ends: where each ends, in bytes."""
    groups: list[tuple[int, int, list[Found]]] = []
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
    """Tokens [start, end), and those around them as long as a character is cut in two."""
    while start and _continues(text, ends[start - 1]):
        start -= 1
    while end < len(ends) and _continues(text, ends[end - 1]):
        end += 1
    return start, end


def _continues(text: bytes, at: int) -> bool:
    return at < len(text) and text[at] & 0xC0 == 0x80


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a step, packed as in `Step`; spans in the indexes after redaction."""

    prompt: bytes | None
    response: bytes | None
    logprobs: bytes | None
    versions: tuple[VersionSpan, ...]
    redacted_prompt: tuple[TokenSpan, ...] = ()
    redacted_response: tuple[TokenSpan, ...] = ()


def redacted_tokens(tokens: Tokens, vocabulary: Vocabulary, scan: Scan) -> Tokens:
    """A step's tokens without secrets; the same object when they show none. A redacted token has no log-probability (`ABSENT`).

    Raises UnknownToken and TokensDisagree.
    """
    prompt, response = tokens.prompt or b"", tokens.response or b""
    if len(prompt) % WIDTH or len(response) % WIDTH:
        raise TokensDisagree(
            f"{len(prompt)} and {len(response)} bytes of ids are no whole number of ids"
        )
    if tokens.logprobs is not None and len(tokens.logprobs) != len(response):
        raise TokensDisagree(
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
        _moved(tokens.versions, after),
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


def _moved(versions: Sequence[VersionSpan], edits: Sequence[Edit]) -> tuple[VersionSpan, ...]:
    """Version spans in the new indexes. A replacement belongs to the version that sampled the first token it replaces."""

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

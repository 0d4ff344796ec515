"""The words of texts and of searches. Pure.

A word is a run of letters, digits and combining marks, in lower case and without accents. Each
character of a script that writes no spaces between words (Chinese, Japanese, Thai, Lao, Khmer,
Burmese) is a word of its own, so a search for several of them is a phrase.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

_ACCENTS = re.compile("[\u0300-\u036f]+")
_BEYOND_ASCII = re.compile("[^\0-\x7f]+")
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"
)
_WORD = re.compile("[a-z0-9\x80-\U0010ffff]+")
_TERM = re.compile(r'"([^"]*)"?|([^\s"]+)')


class Term(NamedTuple):
    """Words that stand next to each other in a text.

    is_prefix: The last one is the beginning of a word, or a whole word.
    """

    words: tuple[str, ...]
    is_prefix: bool


def plain(text: str) -> str:
    """Return a text in lower case and without accents, with its words apart.

    All characters beyond ASCII that are left belong to words.
    """
    if text.isascii():
        return text.lower()
    bare = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    folded = unicodedata.normalize("NFKC", bare).casefold()
    return _BEYOND_ASCII.sub(lambda found: found[0].translate(_SPACED), folded)


def words_of(text: str) -> list[str]:
    """Return the words of a text, in order."""
    return _WORD.findall(plain(text))


def terms_of(search: str) -> list[Term]:
    """Return the terms of a search, each once: phrases in quotes, and all else at its spaces.

    The last word of a term outside quotes is a prefix, unless it is a single character.
    """
    terms = dict[Term, None]()
    for phrase, word in _TERM.findall(search):
        if found := tuple(words_of(phrase or word)):
            terms[Term(found, bool(word) and len(found[-1]) > 1)] = None
    return list(terms)


class _Spacing(dict[int, str]):
    """What `str.translate` makes of a character beyond ASCII."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if not (character.isalnum() or unicodedata.category(character).startswith("M")):
            spaced = " "
        elif _WITHOUT_SPACES.match(character):
            spaced = f" {character} "
        else:
            spaced = character
        self[code] = spaced
        return spaced


_SPACED = _Spacing()

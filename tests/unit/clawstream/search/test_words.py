"""The words of texts, and the terms of searches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.search.words import Term, plain, terms_of, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The KEY, a-b_c/d.e: 7!", ["the", "key", "a", "b", "c", "d", "e", "7"]),
        ("Crème brûlée, ÅNGSTRÖM", ["creme", "brulee", "angstrom"]),
        ("Straße STRASSE ﬁne", ["strasse", "strasse", "fine"]),
        ("ΣΊΣΥΦΟΣ Чай", ["σισυφοσ", "чаи"]),
        ("数据库", ["数", "据", "库"]),
        ("カタカナ ｶﾅ GPT用", ["カ", "タ", "カ", "ナ", "カ", "ナ", "gpt", "用"]),
        ("한국어를", ["한국어를"]),
        ("हिन्दी", ["हिन्दी"]),
        ("“quoted”—dash…", ["quoted", "dash"]),
        ("a\0b\ud800c\ue000d", ["a", "b", "c", "d"]),
        ("🙂 ---", []),
    ],
)
def test_words_of_a_text(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_thai_is_found_by_any_part_of_it() -> None:
    whole, part = words_of("ภาษาไทย"), words_of("ไทย")
    assert part == whole[-len(part) :] and len(part) > 1


@pytest.mark.parametrize(
    ("search", "terms"),
    [
        ("Hello wor", [Term(("hello",), True), Term(("wor",), True)]),
        ('"Hello wor"', [Term(("hello", "wor"), False)]),
        ('a "b c', [Term(("a",), False), Term(("b", "c"), False)]),
        ("call-12-0 foo_ba", [Term(("call", "12", "0"), False), Term(("foo", "ba"), True)]),
        ('x"y"z', [Term((letter,), False) for letter in "xyz"]),
        ("数据", [Term(("数", "据"), False)]),
        ("go go GO", [Term(("go",), True)]),
        ('"" " \'"> ???', []),
    ],
)
def test_terms_of_a_search(search: str, terms: list[Term]) -> None:
    assert terms_of(search) == terms


ASCII = set("abcdefghijklmnopqrstuvwxyz0123456789")


@given(st.text())
def test_words_need_no_escaping_and_are_plain_already(text: str) -> None:
    found = words_of(text)
    assert plain(text).encode("utf-8").decode() == plain(text)
    assert all(ord(c) > 127 or c in ASCII for word in found for c in word)
    assert not any("\ue000" in word for word in found)

"""Filters and places that an address gives: what cannot be read is an error that names it."""

from __future__ import annotations

import pytest

from clawstream.inspector.errors import InvalidAddress
from clawstream.inspector.queries.filters import TEXT_CHARACTERS, Filters, parse_filters
from clawstream.inspector.queries.listing import PAGE, Place, parse_place, parse_rows, parse_sort


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("version", text) for text in ("9" * 40, "-" + "9" * 40, "x", "1.5", "1e400")),
        *(("reward_min", text) for text in ("much", "nan", "inf", "1e999")),
        ("stage", "nope"), ("outcome", "nope"), ("versoin", "3"),
    ],
)  # fmt: skip
def test_a_filter_that_cannot_be_read_is_named(name: str, text: str) -> None:
    with pytest.raises(InvalidAddress, match=name):
        parse_filters({name: text})


def test_an_empty_filter_and_the_place_in_a_list_are_no_filters() -> None:
    assert parse_filters({"version": " ", "sort": "-reward", "rows": "100"}) == Filters()


def test_a_search_has_a_bound() -> None:
    longest = "x" * TEXT_CHARACTERS
    assert parse_filters({"text": longest}) == Filters(text=longest)
    with pytest.raises(InvalidAddress, match="at most 400 characters"):
        parse_filters({"text": longest + "x"})


@pytest.mark.parametrize("query", [{}, {"before_id": "x"}])
def test_a_place_without_a_time_is_the_newest(query: dict[str, str]) -> None:
    assert parse_place(query) is None


def test_a_place_is_a_value_of_the_order_a_time_and_an_id() -> None:
    query = {"before_at": "2026-01-02T03:04:05", "before_id": "x"}
    assert parse_place(query) == Place(0.0, "2026-01-02T03:04:05", "x")
    assert parse_place(query | {"before_key": "-inf"}) == Place(
        float("-inf"), "2026-01-02T03:04:05", "x"
    )
    for wrong in ({"before_key": "x"}, {"before_at": "abc"}, {"before_at": ""}):
        with pytest.raises(InvalidAddress, match="before_"):
            parse_place(query | wrong)


def test_only_known_columns_order_the_list() -> None:
    assert [parse_sort({"sort": text}) for text in ("reward", "-reward", "")] == [
        "reward", "-reward", None,
    ]  # fmt: skip
    with pytest.raises(InvalidAddress, match="sort"):
        parse_sort({"sort": "--reward"})


def test_a_list_has_a_greatest_length() -> None:
    assert [parse_rows(query) for query in ({}, {"rows": "150"})] == [PAGE, 150]
    for text in ("0", "501", "x", "9" * 40):
        with pytest.raises(InvalidAddress, match="rows"):
            parse_rows({"rows": text})

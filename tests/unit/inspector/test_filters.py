"""Filters and places that an address gives: what cannot be read is ignored."""

from __future__ import annotations

import pytest

from inspector.errors import SearchTooLong
from inspector.queries.filters import TEXT_CHARACTERS, Filters, parse_filters
from inspector.queries.listing import Place, parse_place, parse_sort


@pytest.mark.parametrize("text", ["9" * 40, "-" + "9" * 40, "x", "1.5", ""])
def test_a_version_that_sql_cannot_hold_is_ignored(text: str) -> None:
    assert parse_filters({"version": text}) == Filters()


def test_a_search_has_a_bound() -> None:
    longest = "x" * TEXT_CHARACTERS
    assert parse_filters({"text": longest}) == Filters(text=longest)
    with pytest.raises(SearchTooLong, match="at most 400 characters"):
        parse_filters({"text": longest + "x"})


@pytest.mark.parametrize(
    "query", [{}, {"before_id": "x"}, {"before_id": "x", "before_at": "abc"}, {"before_at": ""}]
)
def test_a_place_without_a_time_is_the_newest(query: dict[str, str]) -> None:
    assert parse_place(query) is None


def test_a_place_is_a_value_of_the_order_a_time_and_an_id() -> None:
    query = {"before_at": "2026-01-02T03:04:05", "before_id": "x"}
    assert parse_place(query) == Place(0.0, "2026-01-02T03:04:05", "x")
    assert parse_place(query | {"before_key": "-inf"}) == Place(
        float("-inf"), "2026-01-02T03:04:05", "x"
    )
    assert parse_place(query | {"before_key": "x"}) is None


@pytest.mark.parametrize(
    ("text", "expected"), [("reward", "reward"), ("-reward", "-reward"), ("--reward", None)]
)
def test_only_known_columns_order_the_list(text: str, expected: str | None) -> None:
    assert parse_sort({"sort": text}) == expected

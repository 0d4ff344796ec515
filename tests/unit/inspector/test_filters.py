"""Filters and places that an address gives: what cannot be read is ignored."""

from __future__ import annotations

import pytest

from inspector.queries.filters import Filters, parse_filters, parse_place


@pytest.mark.parametrize("text", ["9" * 40, "-" + "9" * 40, "x", "1.5", ""])
def test_a_version_that_sql_cannot_hold_is_ignored(text: str) -> None:
    assert parse_filters({"version": text}) == Filters()


@pytest.mark.parametrize(
    "query", [{}, {"before_id": "x"}, {"before_id": "x", "before_at": "abc"}, {"before_at": ""}]
)
def test_a_place_without_a_time_is_the_newest(query: dict[str, str]) -> None:
    assert parse_place(query) is None


def test_a_place_is_a_time_and_an_id() -> None:
    place = ("2026-01-02T03:04:05", "x")
    assert parse_place({"before_at": place[0], "before_id": place[1]}) == place

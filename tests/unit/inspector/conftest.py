"""Fixtures of the inspector's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.inspector import QUERIES


@pytest.fixture(scope="module", autouse=True)
def no_query_process_is_left() -> Iterator[None]:
    """End the processes that wait for a query, after the tests of a module."""
    yield
    while QUERIES:
        QUERIES.pop().close()

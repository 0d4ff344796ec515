"""One browser for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return Chromium."""
    from support.browser import chromium  # without Playwright the tests are skipped

    with chromium() as started:
        yield started

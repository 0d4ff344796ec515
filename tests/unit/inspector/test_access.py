"""What the application replies before a page is looked up."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fastapi.testclient import TestClient

from gateway.errors import KeysUnreadable
from inspector.live.feed import Live
from inspector.metrics import PageMetrics
from inspector.web.access import is_cross_site
from inspector.web.app import HEADERS, Parts, create_app


class NoLake:
    """A lake without rows."""

    def rows(self, query: str, parameters: Any = None) -> list[dict[str, Any]]:
        return []

    def refresh(self) -> bool:
        return False

    def newest_commit_s(self) -> float | None:
        return None

    def close(self) -> None:
        pass


def client_of(user_of: Any) -> TestClient:
    lake, nothing = NoLake(), cast(Any, None)  # no request reaches these
    parts = Parts(
        lake, Live(lake), user_of, lambda *_: None, lambda *_: None, "http://gateway",
        marks=nothing, rewards=(0.0, 1.0), policies=nothing, sql=nothing,
        operations=nothing, activity=nothing, metrics=PageMetrics(),
    )  # fmt: skip
    return TestClient(create_app(parts), follow_redirects=False)


def test_unreadable_keys_are_a_page_that_says_so() -> None:
    def unreadable(key: str) -> None:
        raise KeysUnreadable("keys.json cannot be read")

    reply = client_of(unreadable).get("/", headers={"authorization": "Bearer x"})
    assert reply.status_code == 503 and "keys.json cannot be read" in reply.text
    assert {name: reply.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({"sec-fetch-site": "same-origin", "origin": "https://a", "host": "upstream"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "https://a", "host": "a"}, True),
        ({"sec-fetch-site": "same-site", "host": "a"}, True),
        ({"origin": "https://b", "host": "a"}, True),
        ({"origin": "https://a", "host": "a"}, False),
        ({}, False),
    ],
)
def test_the_browser_says_whether_another_site_sent_a_form(
    headers: dict[str, str], foreign: bool
) -> None:
    assert is_cross_site(headers) is foreign

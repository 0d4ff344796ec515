"""What the application replies before a page is looked up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any, ClassVar, cast

import pytest
from fastapi.testclient import TestClient

from clawstream.gateway.errors import KeysUnreadable
from clawstream.inspector.live.feed import Live
from clawstream.inspector.metrics import PageMetrics
from clawstream.inspector.operations.observation import Observation
from clawstream.inspector.operations.watcher import Watcher
from clawstream.inspector.web.access import User, is_cross_site
from clawstream.inspector.web.app import HEADERS, Parts, create_app


class NoLake:
    """A lake without rows."""

    failed: ClassVar[dict[str, str]] = {}

    def rows(self, query: str, parameters: Any = None) -> list[dict[str, Any]]:
        return []

    def refresh(self) -> bool:
        return False

    def newest_commit_s(self) -> float | None:
        return None

    def close(self) -> None:
        pass


class CallsCome(NoLake):
    """A lake in which a trajectory has more calls at each look."""

    def __init__(self) -> None:
        self._calls = count()

    def rows(self, query: str, parameters: Any = None) -> list[dict[str, Any]]:
        return [{"state": next(self._calls)}] if "AS state" in query else []


class FewChanges(Live):
    """A live tail with three changes."""

    async def changes(self) -> AsyncIterator[None]:
        for _ in range(3):
            yield

    ticks = changes


class FewObservations(Watcher):
    """A watcher with three observations."""

    async def changes(self) -> AsyncIterator[None]:
        for number in range(3):
            self.latest = Observation(0.0, dead_letters=number)
            yield


def client_of(user_of: Any, lake: Any = None) -> TestClient:
    lake, nothing = lake or NoLake(), cast(Any, None)  # no request reaches these
    parts = Parts(
        lake, FewChanges(lake), user_of, lambda *_: None, lambda *_: None, "http://gateway",
        marks=nothing, rewards=(0.0, 1.0), policies=nothing, sql=nothing,
        operations=FewObservations(nothing), activity=nothing, metrics=PageMetrics(),
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


@pytest.mark.parametrize(
    ("path", "event"),
    [
        ("/live", "event: live"),
        ("/operations/changes", "event: facts"),
        ("/t/run/key/changes", "event: changed"),
    ],
)
def test_a_stream_ends_when_its_key_is_revoked(path: str, event: str) -> None:
    ann = User("ann", frozenset({"curate"}))
    keys = [ann, ann]  # valid for the request and the first change
    client = client_of(lambda _: keys.pop() if keys else None, CallsCome())
    reply = client.get(path, headers={"authorization": "Bearer x"})
    assert reply.text.count(event) == 1


def test_a_stream_ends_when_the_keys_are_unreadable() -> None:
    found = iter([User("ann", frozenset({"curate"}))])

    def user_of(_: str) -> User:
        for user in found:
            return user
        raise KeysUnreadable("keys.json cannot be read")

    reply = client_of(user_of).get("/live", headers={"authorization": "Bearer x"})
    assert reply.status_code == 200 and "event:" not in reply.text

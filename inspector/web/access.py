"""Who may see and change what: a key by a login form, then a cookie; or a key in the header.

The form exchanges the key for a session of this process, so the cookie is no key. Each request
checks that the key is still valid. Cookies are HttpOnly and SameSite=Strict, and a POST from
another site is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

COOKIE = "clawstream_inspector"
SESSIONS = 1000
"""Sessions that are kept; the oldest one ends."""


class User(NamedTuple):
    """Who makes a request: the name of the key, and its scopes."""

    name: str
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class Access:
    """The sessions of one process.

    Args:
        user_of: the user of a key, as the user gives it; None if it does not allow to see
            everything.
    """

    def __init__(self, user_of: Callable[[str], User | None]) -> None:
        self._user_of = user_of
        self._keys: dict[str, str] = {}

    def log_in(self, key: str) -> str | None:
        """Return a new session; None if the key is not valid."""
        if self._user_of(key) is None:
            return None
        session = secrets.token_urlsafe(32)
        self._keys[session] = key
        while len(self._keys) > SESSIONS:
            self._keys.pop(next(iter(self._keys)))
        return session

    def log_out(self, session: str | None) -> None:
        """End a session."""
        self._keys.pop(session or "", None)

    def user(self, authorization: str | None, session: str | None) -> User | None:
        """Return who makes a request; None if it may not see the pages.

        Args:
            authorization: its header. session: its cookie.
        """
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else self._keys.get(session or "")
        return None if given is None else self._user_of(given)


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether another site made the request, by the headers that browsers send.

    A browser without `Sec-Fetch-Site` is judged by `Origin`, which a proxy that changes `Host`
    makes look foreign.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("none", "same-origin")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")

"""Who may see the pages: a key by a login form, then a cookie; or a key in the header.

The form exchanges the key for a session of this process, so the cookie is no key. Each request
checks that the key is still valid. Cookies are HttpOnly and SameSite=Strict, and a POST from
another site is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

COOKIE = "clawstream_inspector"
SESSIONS = 1000
"""Sessions that are kept; the oldest one ends."""


class Access:
    """The sessions of one process.

    Args:
        may_read: whether a key, as the user gives it, allows to see everything.
    """

    def __init__(self, may_read: Callable[[str], bool]) -> None:
        self._may_read = may_read
        self._keys: dict[str, str] = {}

    def log_in(self, key: str) -> str | None:
        """Return a new session; None if the key is not valid."""
        if not self._may_read(key):
            return None
        session = secrets.token_urlsafe(32)
        self._keys[session] = key
        while len(self._keys) > SESSIONS:
            self._keys.pop(next(iter(self._keys)))
        return session

    def log_out(self, session: str | None) -> None:
        """End a session."""
        self._keys.pop(session or "", None)

    def allowed(self, authorization: str | None, session: str | None) -> bool:
        """Return whether a request may see the pages.

        Args:
            authorization: its header. session: its cookie.
        """
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else self._keys.get(session or "")
        return given is not None and self._may_read(given)


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether another site made the request, by the headers that browsers send."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")

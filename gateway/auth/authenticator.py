"""Authenticate the caller of a request and check its scopes. Does no I/O per request.

A request carries at most one Clawstream key, as `Authorization: Bearer`, `x-api-key` (Anthropic's
clients) or `api-key`:

- an API key, `claw-...`: its scopes limit the caller, and its run, if it has one, is the run of
  every record the caller writes;
- a session key, `sk-claw-...`: scope agent for one trajectory, valid as long as the API key that
  opened it;
- any other value, or none: an unknown caller. Where `gateway.auth` is open, every caller may do
  everything, and `sk-claw-TEXT` without a signature is such a value.

An invalid Clawstream key is refused even where no key is required. Keys are looked up by their
SHA-256 and never logged.

A web page without a Clawstream key is answered only if it is of this machine or its origin is in
`gateway.cors_origins`: a browser sends any page's requests to an open gateway on loopback, also
under a name that the page's owner has pointed to 127.0.0.1. A page of a site has the scheme http or
https, or the origin `null` in a sandboxed frame. Other schemes (`vscode-webview:`, `file:`) are
those of installed programs, which no site can use. A request without an origin may still be of
such a page. So an open gateway on loopback answers it only under a name that no site can own: an
address, a name without a dot, one of a reserved domain, or a name in the settings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from clawstream.gateway.auth import api_keys
from clawstream.gateway.auth.api_keys import ApiKey, KeyRing, Scope, digest_of
from clawstream.gateway.auth.session_keys import (
    KEY_PREFIXES,
    PREFIX,
    Session,
    SessionKeys,
    secret_of,
)
from clawstream.gateway.errors import Forbidden, KeysUnreadable, WrongKey
from clawstream.gateway.metrics import Metrics
from clawstream.runtime.logs import logger
from clawstream.schemas.records import Channel
from clawstream.schemas.settings import Settings

KEY_HEADERS = ("x-api-key", "api-key")
OWN_DOMAINS = (".localhost", ".local", ".internal")
"""Domains that nobody can register."""
HOSTS_KEPT = 256
LOOPBACK = ("localhost", "127.0.0.1", "::1")
RELOAD_S = 1.0
"""Interval in seconds between reads of the API key file: a revoked key stays valid this long."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    identity: SHA-256 of the credential as received, b"" without one. unbound: no key is required.
    """

    identity: bytes
    key: ApiKey | None
    session: Session | None
    unbound: bool

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has the scope. A session key has scope agent."""
        return self.unbound or (
            scope == "agent" if self.key is None or self.session else self.key.may(scope)
        )

    @property
    def name(self) -> str | None:
        """Name of its API key."""
        return self.key.name if self.key is not None else None

    @property
    def run_id(self) -> str | None:
        """The only run that its key writes to, if any."""
        bound = self.session or self.key
        return bound.run_id if bound is not None else None


ANONYMOUS = Principal(b"", None, None, unbound=True)


def credential_of(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request.

    A Clawstream key takes precedence, because clients may also send another provider's key.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    found = [token.strip()] if scheme.lower() == "bearer" else []
    found += [headers[name] for name in KEY_HEADERS if name in headers]
    if not found:
        return None
    return next((t for t in found if t.startswith(KEY_PREFIXES)), None) or next(
        filter(None, found), None
    )


class Authenticator:
    """Authenticate callers by the API keys of the settings' file and by session keys.

    Raises:
        KeysUnreadable: The file of API keys cannot be read.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._required = settings.gateway.auth_required
        self._origins = frozenset(settings.gateway.cors_origins)
        self._session_rewards = settings.gateway.session_rewards
        named = (settings.gateway.public_url or "", *settings.gateway.cors_origins)
        self._hosts = frozenset(urlsplit(url).hostname for url in named)
        self._any_host = not settings.gateway.on_loopback or "*" in self._origins
        self._is_own_host = lru_cache(HOSTS_KEPT)(self._owns)
        self._keys = KeyRing(settings.api_keys_file)
        self._sessions = SessionKeys(secret_of(settings))
        if self._required and not self._keys:
            logger().warning(
                "no_api_keys",
                file=str(settings.api_keys_file),
                do="clawstream keys create, or gateway.auth=open",
            )

    def authenticate(self, headers: Mapping[str, str], scope: Scope) -> Principal:
        """Return the caller of a request.

        Args:
            headers: Names in lower case.
            scope: Scope the caller must have.

        Raises:
            WrongKey: The key is missing or invalid.
            Forbidden: The caller lacks the scope, or is a web page of another site.
        """
        try:
            caller = self._caller(headers)
        except WrongKey:
            self._metrics.keys_refused.labels("unknown").inc()
            raise
        self.require(caller, scope)
        return caller

    def require(self, caller: Principal, scope: Scope) -> None:
        """Raise Forbidden unless the caller has the scope."""
        if not caller.may(scope):
            self._metrics.keys_refused.labels("scope").inc()
            what = "a session key" if caller.session is not None else f"the key {caller.name!r}"
            raise Forbidden(f"{what} lacks the scope {scope!r}", "authorization")

    def require_completion_reward(self, caller: Principal) -> None:
        """Raise Forbidden unless the caller may set the reward when it completes a trajectory."""
        if not (caller.session is not None and self._session_rewards):
            self.require(caller, "reward")

    def session_key(
        self, caller: Principal, run_id: str, trajectory_key: str,
        group_id: str | None = None, channel: Channel | None = None,
    ) -> str:  # fmt: skip
        """Mint the session key of a trajectory, valid as long as the caller's API key."""
        key_id = caller.key.key_id if caller.key is not None else None
        return self._sessions.mint(Session(run_id, trajectory_key, group_id, channel, key_id))

    def _caller(self, headers: Mapping[str, str]) -> Principal:
        token = credential_of(headers)
        if token is None:
            if self._required:
                raise WrongKey(
                    "this gateway needs an API key: as Authorization: Bearer, x-api-key or api-key",
                    "authorization",
                )
            self._check_page(headers)
            return ANONYMOUS
        digest = digest_of(token)
        if token.startswith(api_keys.PREFIX):
            key = self._keys.by_digest(digest)
            if key is None:
                raise WrongKey(
                    "this API key is not known here, was revoked or has expired", "authorization"
                )
            return Principal(digest, key, None, not self._required)
        if token.startswith(PREFIX) and ("." in token or self._required):
            return self._session_caller(token, digest)
        if self._required:
            raise WrongKey(
                "this is no key of this gateway: see clawstream keys create", "authorization"
            )
        self._check_page(headers)
        return Principal(digest, None, None, unbound=True)

    def _check_page(self, headers: Mapping[str, str]) -> None:
        """Raise Forbidden if a web page of another site makes the request, or may make it."""
        origin = headers.get("origin")
        if origin is None:
            host = headers.get("host", "")
            if not (self._any_host or self._is_own_host(host)):
                raise Forbidden(
                    f"host: a site may have led its name {host[:200]!r} to this gateway; if it is "
                    "yours, set gateway.public_url or use an API key",
                    "host",
                )
            return
        if not self._origins.isdisjoint(("*", origin)):
            return
        try:
            scheme, host = (parts := urlsplit(origin)).scheme, parts.hostname or ""
        except ValueError:
            scheme = host = ""
        is_site = scheme in ("", "http", "https")
        if is_site and host not in LOOPBACK and not host.endswith(".localhost"):
            raise Forbidden(
                f"pages of {origin[:200]!r} may not call this gateway: name the origin in "
                "gateway.cors_origins, or use an API key",
                "origin",
            )

    def _owns(self, host: str) -> bool:
        """Tell whether no web site can have this Host."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if "." not in name or name in self._hosts or name.endswith(OWN_DOMAINS):
            return True
        with contextlib.suppress(ValueError):
            ip_address(name)
            return True
        return False

    def _session_caller(self, token: str, digest: bytes) -> Principal:
        session = self._sessions.find(token, digest)
        key = None
        if session.key_id is not None:
            key = self._keys.by_id(session.key_id)
            if key is None:
                raise WrongKey(
                    "the API key that opened this session was revoked or has expired",
                    "authorization",
                )
        elif self._required:
            raise WrongKey(
                "this session was opened without an API key: open a new session", "authorization"
            )
        return Principal(digest, key, session, not self._required)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Reload the file of API keys on changes while the context is entered."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        broken = False
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                if await asyncio.to_thread(self._keys.reload):
                    logger().info("api_keys_loaded", keys=len(self._keys))
                broken = False
            except KeysUnreadable as error:
                if not broken:
                    logger().error(
                        "api_keys_unreadable",
                        error=str(error),
                        do="the keys that were read before stay valid",
                    )
                broken = True

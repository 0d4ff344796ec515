"""The door: who a request comes from, what that one may do, and which trajectory it belongs to. No I/O on the way of a request.

A request carries at most one key of ours, as `Authorization: Bearer`, `x-api-key` (Anthropic's clients) or `api-key`:

- an API key, `claw-...`: its scopes say what it may do, and its run, if it has one, is the run of all it writes;
- a session key, `sk-claw-...`: scope agent for one trajectory, as long as the API key that opened it lives;
- anything else, or nothing: nobody we know. Where `gateway.auth` is open that one may do everything, as may everyone else.

A wrong key of ours is refused even where none is needed. Keys are looked up by their SHA-256 and never logged.

The run: the API key's, else the session key's, else header x-clawstream-run, else the setting. The trajectory: the path's, else header
x-clawstream-trajectory, else the session key's, else the session that a known agent names itself (`agent`), else a bucket: the hash of
who calls and the user's first turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.attribution.agents import session_of
from gateway.attribution.conversation import first_user_turn
from gateway.attribution.sessions import (
    CHANNEL_HEADER,
    OURS,
    PREFIX,
    SessionKeys,
    TrajectoryRef,
    channel_of,
    checked,
    secret_of,
)
from gateway.auth import api_keys
from gateway.auth.api_keys import ApiKey, KeyRing, Scope, digest_of
from gateway.errors import BadRequest, Forbidden, KeysUnreadable, WrongKey
from gateway.metrics import Metrics
from runtime.logs import logger
from schemas.ids import agent_key, bucket_key
from schemas.settings import Settings

RUN_HEADER = "x-clawstream-run"
TRAJECTORY_HEADER = "x-clawstream-trajectory"
GROUP_HEADER = "x-clawstream-group"
KEY_HEADERS = ("x-api-key", "api-key")
RELOAD_S = 1.0
"""How often the file of API keys is looked at: so long a revoked key lives on."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. identity: SHA-256 of the credential as it came, b"" without one. unbound: no key is needed here."""

    identity: bytes
    key: ApiKey | None
    session: TrajectoryRef | None
    unbound: bool

    def may(self, scope: Scope) -> bool:
        """Whether it has the scope. A session key has scope agent."""
        return self.unbound or (
            scope == "agent" if self.key is None or self.session else self.key.may(scope)
        )

    @property
    def name(self) -> str | None:
        """Name of its API key."""
        return self.key.name if self.key is not None else None


NOBODY = Principal(b"", None, None, unbound=True)


def credential_of(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries: one of ours if there is one, for clients may send another provider's beside it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    found = [token.strip()] if scheme.lower() == "bearer" else []
    found += [headers[name] for name in KEY_HEADERS if name in headers]
    return next((t for t in found if t.startswith(OURS)), None) or next(filter(None, found), None)


class Door:
    """Made once from the settings. Raises KeysUnreadable when the file of API keys cannot be read."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._default_run = settings.run_id
        self._required = settings.gateway.auth_required
        self._session_rewards = settings.gateway.session_rewards
        self._keys = KeyRing(settings.api_keys_file)
        self._sessions = SessionKeys(secret_of(settings))
        if self._required and not self._keys:
            logger().warning(
                "no_api_keys",
                file=str(settings.api_keys_file),
                do="clawstream keys create, or gateway.auth=open",
            )

    # -- who

    def authenticate(self, headers: Mapping[str, str], scope: Scope) -> Principal:
        """Who asks, if that one may. headers: names in lower case. Raises WrongKey or Forbidden."""
        try:
            caller = self._caller(headers)
            self.require(caller, scope)
        except WrongKey:
            self._metrics.keys_refused.labels("unknown").inc()
            raise
        return caller

    def require(self, caller: Principal, scope: Scope) -> None:
        """Raises Forbidden unless the caller has the scope."""
        if not caller.may(scope):
            self._metrics.keys_refused.labels("scope").inc()
            what = "a session key" if caller.session is not None else f"the key {caller.name!r}"
            raise Forbidden(f"{what} lacks the scope {scope!r}", "authorization")

    def require_completion_reward(self, caller: Principal) -> None:
        """Raises Forbidden unless the caller may say the reward when it completes a trajectory."""
        if not (caller.session is not None and self._session_rewards):
            self.require(caller, "reward")

    def _caller(self, headers: Mapping[str, str]) -> Principal:
        token = credential_of(headers)
        if token is None:
            if self._required:
                raise WrongKey(
                    "this gateway needs an API key: as Authorization: Bearer, x-api-key or api-key",
                    "authorization",
                )
            return NOBODY
        digest = digest_of(token)
        if token.startswith(api_keys.PREFIX):
            key = self._keys.by_digest(digest)
            if key is None:
                raise WrongKey(
                    "this API key is not known here, was revoked or has expired", "authorization"
                )
            return Principal(digest, key, None, not self._required)
        if token.startswith(PREFIX):
            return self._session_caller(token, digest)
        if self._required:
            raise WrongKey(
                "this is no key of this gateway: see clawstream keys create", "authorization"
            )
        return Principal(digest, None, None, unbound=True)

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
                "this session was opened without an API key: open it anew", "authorization"
            )
        return Principal(digest, key, session.origin, not self._required)

    # -- where

    def admit(
        self,
        headers: Mapping[str, str],
        scope: Scope,
        key: str | None = None,
        group: str | None = None,
        said: Mapping[str, Any] | None = None,
    ) -> TrajectoryRef:
        """Where a request belongs, if its caller may. The same as `authenticate`, then `origin`."""
        return self.origin(self.authenticate(headers, scope), headers, key, group, said)

    def run_of(
        self, caller: Principal, headers: Mapping[str, str], asked: str | None = None
    ) -> str:
        """The run of what the caller writes. asked: the one a body names. Raises Forbidden when the caller's key has another."""
        pinned = (
            caller.session.run_id
            if caller.session is not None
            else caller.key.run_id
            if caller.key is not None
            else None
        )
        if asked is not None and pinned is not None and asked != pinned:
            raise Forbidden(f"run_id: this key writes to run {pinned!r} only", "run_id")
        return pinned or asked or headers.get(RUN_HEADER) or self._default_run

    def origin(
        self,
        caller: Principal,
        headers: Mapping[str, str],
        key: str | None = None,
        group: str | None = None,
        said: Mapping[str, Any] | None = None,
        run: str | None = None,
    ) -> TrajectoryRef:
        """Where a request of the caller belongs.

        headers: names in lower case. key, group: trajectory and prompt uid of the path. said: what the body of a model call says. run: the
        one that a body names. Raises BadRequest, or Forbidden when a session key names another trajectory than its own.
        """
        session = caller.session
        key = key or headers.get(TRAJECTORY_HEADER)
        group = group or _utf8(headers.get(GROUP_HEADER))
        channel = channel_of(headers.get(CHANNEL_HEADER)) or (
            session.channel if session is not None else None
        )
        if session is not None:
            key = key or session.trajectory_key
            if key == session.trajectory_key:
                group = group or session.group_id
            elif not caller.unbound:
                raise Forbidden(
                    f"this session key is for trajectory {session.trajectory_key!r} only",
                    "trajectory_key",
                )
        if key is None:
            if said is None:
                raise BadRequest(
                    f"no trajectory: name it in the path or in {TRAJECTORY_HEADER}, or use a session key",
                    TRAJECTORY_HEADER,
                )
            key = _unnamed_key(caller, headers, said)
        return checked(self.run_of(caller, headers, run), key, group, channel)

    def mint(self, caller: Principal, origin: TrajectoryRef) -> str:
        """A session key for the origin, that lives as long as the caller's API key."""
        return self._sessions.mint(origin, caller.key.key_id if caller.key is not None else None)

    # -- the file of keys

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Takes in changes of the file of API keys while it is entered."""
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
                        do="the keys read before still hold",
                    )
                broken = True


def _unnamed_key(caller: Principal, headers: Mapping[str, str], said: Mapping[str, Any]) -> str:
    """The trajectory key of a call that names none: any gateway gives the same. The caller is part of it, so nobody meets another's."""
    session = session_of(headers, said)
    if session is None:
        return bucket_key(caller.identity, first_user_turn(said))
    return agent_key(session.agent, caller.identity, session.session_id)


def _utf8(text: str | None) -> str | None:
    """A header's value as the client meant it: HTTP hands it on as latin-1."""
    if text is None or text.isascii():
        return text
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text

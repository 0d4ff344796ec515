"""Authenticate a request, authorize it, and resolve its trajectory. Does no I/O per request.

A request carries at most one Clawstream key, as `Authorization: Bearer`, `x-api-key` (Anthropic's
clients) or `api-key`:

- an API key, `claw-...`: its scopes limit the caller, and its run, if it has one, is the run of
  every record the caller writes;
- a session key, `sk-claw-...`: scope agent for one trajectory, valid as long as the API key that
  opened it;
- any other value, or none: an unknown caller. Where `gateway.auth` is open, every caller may do
  everything.

An invalid Clawstream key is refused even where no key is required. Keys are looked up by their
SHA-256 and never logged.

The run is the first of: the API key's, the session key's, header x-clawstream-run, the setting. The
trajectory is the first of: the path's, header x-clawstream-trajectory, the session key's, the
session that a known agent names (`agents`), an anonymous key: the hash of the caller and the user's
first turn.
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
"""Interval in seconds between reads of the API key file: a revoked key stays valid this long."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Describe an authenticated caller.

    identity: SHA-256 of the credential as received, b"" without one. unbound: no key is required.
    """

    identity: bytes
    key: ApiKey | None
    session: TrajectoryRef | None
    unbound: bool

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has the scope. A session key has scope agent."""
        return self.unbound or (
            scope == "agent" if self.key is None or self.session else self.key.may(scope)
        )

    @property
    def name(self) -> str | None:
        """Return the name of its API key."""
        return self.key.name if self.key is not None else None


NOBODY = Principal(b"", None, None, unbound=True)


def credential_of(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request.

    A Clawstream key takes precedence, because clients may also send another provider's key.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    found = [token.strip()] if scheme.lower() == "bearer" else []
    found += [headers[name] for name in KEY_HEADERS if name in headers]
    return next((t for t in found if t.startswith(OURS)), None) or next(filter(None, found), None)


class Door:
    """Authenticate callers and resolve their trajectories.

    Raises:
        KeysUnreadable: The file of API keys cannot be read.
    """

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

    # -- authentication

    def authenticate(self, headers: Mapping[str, str], scope: Scope) -> Principal:
        """Return the caller of a request.

        Args:
            headers: Names in lower case.
            scope: Scope the caller must have.

        Raises:
            WrongKey: The key is missing or invalid.
            Forbidden: The caller lacks the scope.
        """
        try:
            caller = self._caller(headers)
            self.require(caller, scope)
        except WrongKey:
            self._metrics.keys_refused.labels("unknown").inc()
            raise
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

    # -- trajectory

    def admit(
        self,
        headers: Mapping[str, str],
        scope: Scope,
        key: str | None = None,
        group: str | None = None,
        said: Mapping[str, Any] | None = None,
    ) -> TrajectoryRef:
        """Call `authenticate`, then `origin`."""
        return self.origin(self.authenticate(headers, scope), headers, key, group, said)

    def run_of(
        self, caller: Principal, headers: Mapping[str, str], asked: str | None = None
    ) -> str:
        """Return the run that the caller writes to.

        Args:
            caller: The authenticated caller.
            headers: Names in lower case.
            asked: Run named in the body.

        Raises:
            Forbidden: The caller's key is bound to another run.
        """
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
        """Return the trajectory of a caller's request.

        Args:
            caller: The authenticated caller.
            headers: Names in lower case.
            key: Trajectory uid of the path.
            group: Prompt uid of the path.
            said: Body of a model call.
            run: Run named in the body.

        Raises:
            BadRequest: The request names no trajectory, or an id is invalid.
            Forbidden: A session key names another trajectory than its own, or the run is not the
                key's.
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
                    f"no trajectory: name it in the path or in {TRAJECTORY_HEADER}, "
                    "or use a session key",
                    TRAJECTORY_HEADER,
                )
            key = _unnamed_key(caller, headers, said)
        return checked(self.run_of(caller, headers, run), key, group, channel)

    def mint(self, caller: Principal, origin: TrajectoryRef) -> str:
        """Mint a session key for the origin, valid as long as the caller's API key."""
        return self._sessions.mint(origin, caller.key.key_id if caller.key is not None else None)

    # -- API key file

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
                        do="the keys read before still hold",
                    )
                broken = True


def _unnamed_key(caller: Principal, headers: Mapping[str, str], said: Mapping[str, Any]) -> str:
    """Return the trajectory key of a call that names none; equal on every gateway.

    The key includes the caller, so two callers never share a trajectory.
    """
    session = session_of(headers, said)
    if session is None:
        return bucket_key(caller.identity, first_user_turn(said))
    return agent_key(session.agent, caller.identity, session.session_id)


def _utf8(text: str | None) -> str | None:
    """Decode a header value as UTF-8: HTTP servers pass it on as latin-1."""
    if text is None or text.isascii():
        return text
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text

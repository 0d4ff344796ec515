"""Resolve the run and the trajectory of a request. Pure.

The run is the first of: the one that the caller's key is bound to, the body's, header
x-clawstream-run, the setting. The trajectory is the first of: the path's, header
x-clawstream-trajectory, the session key's, the session that a known agent names (`agents`), an
anonymous key: the hash of the caller and the user's first turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from clawstream.gateway.attribution.agents import session_of
from clawstream.gateway.attribution.conversation import first_user_turn
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.errors import BadRequest, Forbidden
from clawstream.schemas.errors import InvalidId
from clawstream.schemas.ids import (
    agent_key,
    anonymous_session_key,
    check_group_id,
    check_run_id,
    check_trajectory_key,
)
from clawstream.schemas.records import Channel

RUN_HEADER = "x-clawstream-run"
TRAJECTORY_HEADER = "x-clawstream-trajectory"
GROUP_HEADER = "x-clawstream-group"
CHANNEL_HEADER = "x-clawstream-channel"


class TrajectoryRef(NamedTuple):
    """Identify the trajectory of a record.

    group_id None: the trajectory is its own group. channel None: the request named no channel.
    """

    run_id: str
    trajectory_key: str
    group_id: str | None
    channel: Channel | None

    @property
    def kafka_key(self) -> bytes:
        return self.trajectory_key.encode()


class TrajectoryResolver:
    """Resolve the trajectories of requests. default_run: Setting run_id."""

    def __init__(self, default_run: str) -> None:
        self._default_run = default_run

    def run_of(
        self, caller: Principal, headers: Mapping[str, str], requested: str | None = None
    ) -> str:
        """Return the run that the caller writes to.

        Args:
            caller: The authenticated caller.
            headers: Names in lower case.
            requested: Run named in the body.

        Raises:
            Forbidden: The caller's key is bound to another run.
        """
        bound = caller.run_id
        if requested is not None and bound is not None and requested != bound:
            raise Forbidden(f"run_id: this key writes to run {bound!r} only", "run_id")
        return bound or requested or headers.get(RUN_HEADER) or self._default_run

    def resolve(
        self,
        caller: Principal,
        headers: Mapping[str, str],
        key: str | None = None,
        group: str | None = None,
        payload: Mapping[str, Any] | None = None,
        run: str | None = None,
        channel: Channel | None = None,
    ) -> TrajectoryRef:
        """Return the trajectory of a caller's request.

        Args:
            caller: The authenticated caller.
            headers: Names in lower case.
            key: Trajectory uid of the path.
            group: Prompt uid of the path.
            payload: Body of a model call.
            run, channel: Those named in the body; the channel precedes the header's.

        Raises:
            BadRequest: The request names no trajectory, or an id is invalid.
            Forbidden: A session key names another trajectory than its own, or the run is not the
                key's.
        """
        session = caller.session
        key = key or headers.get(TRAJECTORY_HEADER)
        group = group or _utf8(headers.get(GROUP_HEADER))
        in_header = _channel(headers.get(CHANNEL_HEADER))
        channel = channel or in_header
        if session is not None:
            channel = channel or session.channel
            key = key or session.trajectory_key
            if key == session.trajectory_key:
                group = group or session.group_id
            elif not caller.unbound:
                raise Forbidden(
                    f"this session key is for trajectory {session.trajectory_key!r} only",
                    "trajectory_key",
                )
        if key is None:
            if payload is None:
                raise BadRequest(
                    f"no trajectory: name it in the path or in {TRAJECTORY_HEADER}, "
                    "or use a session key",
                    TRAJECTORY_HEADER,
                )
            key = _assigned_key(caller, headers, payload)
        return _checked(TrajectoryRef(self.run_of(caller, headers, run), key, group, channel))


def _assigned_key(caller: Principal, headers: Mapping[str, str], payload: Mapping[str, Any]) -> str:
    """Return the trajectory key of a call that names none; equal on every gateway.

    The key includes the caller, so two callers never share a trajectory.
    """
    session = session_of(headers, payload)
    if session is None:
        return anonymous_session_key(caller.identity, first_user_turn(payload))
    return agent_key(session.agent, caller.identity, session.session_id)


def _utf8(text: str | None) -> str | None:
    """Decode a header value as UTF-8: HTTP servers pass it on as latin-1."""
    if text is None or text.isascii():
        return text
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text


def _channel(value: str | None) -> Channel | None:
    match value:
        case None | "train" | "val":
            return value
        case _:
            raise BadRequest(
                f"{CHANNEL_HEADER}: {value[:40]!r} is no channel, use train or val", CHANNEL_HEADER
            )


def _checked(trajectory: TrajectoryRef) -> TrajectoryRef:
    """Return `trajectory`. Raises BadRequest that names the invalid id."""
    param = "run_id"
    try:
        check_run_id(trajectory.run_id)
        param = "trajectory_key"
        check_trajectory_key(trajectory.trajectory_key)
        if trajectory.group_id is not None:
            param = "group_id"
            check_group_id(trajectory.group_id)
    except InvalidId as error:
        raise BadRequest(str(error), param) from error
    return trajectory

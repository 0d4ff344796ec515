"""Serve sessions, registration and completion of trajectories, rewards and curations.

Each request is answered only after its records are durable. An event id is a function of the
event's content, so a repeated request adds nothing. These routes do not check whether a trajectory
exists: assemble dead-letters a record of an unknown one. A key that the gateway assigned (an
anonymous key, or the session of a known agent) holds many trajectories: a request about one of them
names one of its steps.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from gateway.asgi.messages import header_map
from gateway.attribution.resolver import TRAJECTORY_HEADER, TrajectoryRef
from gateway.auth.api_keys import Scope
from gateway.auth.authenticator import Principal
from gateway.durability.record_writer import Event
from gateway.errors import Unprocessable
from gateway.protocols.request_fields import dumps
from gateway.proxy.services import Services
from schemas.errors import InvalidId
from schemas.ids import (
    check_trajectory_key,
    is_gateway_assigned,
    key_of_step,
    new_event_id,
    new_ulid,
    stable_id,
)
from schemas.records import Channel, Curation, Reward, RewardSource, SessionEvent
from schemas.settings import GatewaySettings

ULID = re.compile("[0-9A-HJKMNP-TV-Z]{26}")
STEP_ID = re.compile(rf".+~{ULID.pattern}\.\d{{1,9}}")
Value = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=200)]
Reason = Annotated[str, Field(max_length=2000)]
MAX_TAGS = 32
AT_ONCE = 256
"""Records created before the event loop yields: 10 ms, small beside the wait for Kafka."""
Size = Annotated[int, Field(ge=1, le=100_000, strict=True)]
Round = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenSession(_Body):
    """Body of POST /sessions.

    trajectory_key: a new one by default. metadata: facts about the task for reward functions.
    """

    run_id: str | None = None
    group_id: str | None = None
    group_size: Size | None = None
    round: Round | None = None
    channel: Channel | None = None
    trajectory_key: str | None = None
    metadata: dict[str, Any] | None = None


class Register(_Body):
    """Body that describes a trajectory before its first call."""

    channel: Channel | None = None
    group_size: Size | None = None
    round: Round | None = None
    metadata: dict[str, Any] | None = None


class Complete(_Body):
    """Body that ends a trajectory.

    reward: the reward from the environment, if any. step_id: a step of the trajectory, required
    where the gateway assigned the key.
    """

    step_id: str | None = None
    reward: Value | None = None
    outcome: Literal["completed", "failed", "abandoned"] = "completed"
    reason: Reason | None = None
    channel: Channel | None = None


class GiveReward(_Body):
    """Body of POST /rewards: a reward of a trajectory or, with step_id, of a step.

    value null: explicitly no reward; `reason` is then required.
    """

    trajectory_id: str | None = None
    step_id: str | None = None
    run_id: str | None = None
    source: RewardSource
    name: Text
    value: Value | None = None
    reason: Reason | None = None
    function_version: Text
    reward_revision: Annotated[int, Field(ge=0, le=2**53, strict=True)] = 0
    by: Text | None = None
    detail: Any = None


class Curate(_Body):
    """Body of POST /curations: a mark on a trajectory or, with step_id, on a step.

    An omitted field keeps its value. by: the API key's name by default.
    """

    trajectory_id: str | None = None
    step_id: str | None = None
    run_id: str | None = None
    quality: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)] | None = None
    trainable: Annotated[bool, Field(strict=True)] | None = None
    tags: Annotated[tuple[Text, ...], Field(max_length=MAX_TAGS)] | None = None
    note: Reason | None = None
    by: Text | None = None


def json_of(value: Any, field: str) -> bytes | None:
    """Return a value as stored JSON; None stays None. Raises Unprocessable, see `dumps`."""
    return None if value is None else dumps(value, field, Unprocessable)


class Recorder:
    """Build session events, rewards and curations, and write them to the log."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def opened(self, ref: TrajectoryRef, said: OpenSession | Register) -> SessionEvent:
        """Return the opening of a trajectory.

        An equal opening has the same event id; a different one adds the fields that were absent
        before.
        """
        told = (said.metadata, said.group_size, said.round, ref.channel, ref.group_id)
        return SessionEvent(
            event_id=stable_id(
                ref.run_id,
                ref.trajectory_key,
                "opened",
                dumps(told, "metadata", Unprocessable, sort=True).decode(),
            ),
            run_id=ref.run_id,
            trajectory_key=ref.trajectory_key,
            kind="opened",
            group_id=ref.group_id,
            channel=ref.channel,
            group_size=said.group_size,
            round=said.round,
            metadata_json=json_of(said.metadata, "metadata"),
            created_at=self._services.clock.micros(),
        )

    def ended(self, ref: TrajectoryRef, said: Complete) -> list[Reward | SessionEvent]:
        """Return the trajectory's reward, if it has one, and its end. Raises Unprocessable."""
        if said.step_id is None:
            _of_one_trajectory(ref.trajectory_key, "step_id")
        event = SessionEvent(
            event_id=stable_id(
                ref.run_id,
                ref.trajectory_key,
                said.outcome,
                *filter(None, [said.step_id]),
            ),
            run_id=ref.run_id,
            trajectory_key=ref.trajectory_key,
            kind=said.outcome,
            group_id=ref.group_id,
            channel=ref.channel,
            step_id=said.step_id,
            reason=said.reason,
            created_at=self._services.clock.micros(),
        )
        if said.reward is None:
            return [event]
        reward = GiveReward(
            source="env",
            name="complete_trajectory",
            function_version="1",
            value=said.reward,
            trajectory_id=ref.trajectory_key,
            step_id=said.step_id if is_gateway_assigned(ref.trajectory_key) else None,
        )
        return [self.reward(ref, reward, "reward"), event]

    def reward(
        self,
        ref: TrajectoryRef,
        said: GiveReward,
        field: str = "value",
        by: str | None = None,
    ) -> Reward:
        """Return a reward; an equal one has the same event id.

        Where the gateway assigned the key, step_id identifies the trajectory. If trajectory_id is
        then the key, the reward applies to that whole trajectory, not to the step.

        Args:
            ref: Trajectory of the reward.
            said: The reward.
            field: Name of the value's field in error messages.
            by: Author, unless `said` names one.

        Raises:
            Unprocessable: The value is outside the limits, or a field cannot be stored.
        """
        limits = self._services.settings.gateway
        if said.value is not None and not limits.reward_min <= said.value <= limits.reward_max:
            raise Unprocessable(
                f"{field}: {said.value:g} is not in "
                f"[{limits.reward_min:g}, {limits.reward_max:g}], "
                "see gateway.reward_min and gateway.reward_max",
                field,
            )
        named = said.trajectory_id if is_gateway_assigned(ref.trajectory_key) else None
        target = ",".join(filter(None, (named, said.step_id)))
        parts = (said.source, said.name, said.function_version)
        return Reward(
            event_id=stable_id(
                ref.run_id, ref.trajectory_key, "reward", target, *parts,
                str(said.reward_revision), repr(said.value), said.reason or "",
            ),
            run_id=ref.run_id,
            trajectory_key=ref.trajectory_key,
            trajectory_id=named,
            step_id=said.step_id,
            source=said.source,
            name=said.name,
            function_version=said.function_version,
            value=said.value,
            reason=said.reason,
            reward_revision=said.reward_revision,
            by=said.by or by,
            detail_json=json_of(said.detail, "detail"),
            created_at=self._services.clock.micros(),
        )  # fmt: skip

    def curation(self, ref: TrajectoryRef, said: Curate, by: str, event_id: str) -> Curation:
        """Return a mark.

        Unlike other events, an equal mark is a new event: the last mark holds, even after a
        different one.
        """
        return Curation(
            event_id=event_id,
            run_id=ref.run_id,
            trajectory_key=ref.trajectory_key,
            trajectory_id=said.trajectory_id if is_gateway_assigned(ref.trajectory_key) else None,
            step_id=said.step_id,
            quality=said.quality,
            trainable=said.trainable,
            tags=said.tags,
            note=said.note,
            by=by,
            created_at=self._services.clock.micros(),
        )

    async def record(self, events: Sequence[Event]) -> None:
        """Write the events in this order; all are durable on return.

        Raises:
            NotRecorded: Some of the events may be durable.
        """
        for at in range(0, len(events), AT_ONCE):
            if at:
                await asyncio.sleep(0)
            await self._services.record_writer.record(events[at : at + AT_ONCE])


def target_of(trajectory_id: str | None, step_id: str | None) -> str:
    """Return the trajectory key of a reward's or mark's target.

    Raises:
        Unprocessable: An id is invalid; the error names the field.
    """
    try:
        if step_id is not None:
            if not STEP_ID.fullmatch(step_id):
                raise Unprocessable(
                    f"step_id: {step_id[:80]!r} is not <trajectory>~<ulid>.<choice>", "step_id"
                )
            key = key_of_step(step_id)
            if (
                trajectory_id is not None
                and trajectory_id != key
                and not trajectory_id.startswith(f"{key}~")
            ):
                raise Unprocessable(f"step_id: a step of {key}, not of trajectory_id", "step_id")
            return key
        if trajectory_id is None:
            raise Unprocessable(
                "trajectory_id: or step_id must say what it is about", "trajectory_id"
            )
        key, _, ulid = trajectory_id.partition("~")
        if is_gateway_assigned(key) and ULID.fullmatch(ulid):
            return key
        _of_one_trajectory(key, "trajectory_id")
        return check_trajectory_key(trajectory_id)
    except InvalidId as error:
        raise Unprocessable(
            str(error), "step_id" if step_id is not None else "trajectory_id"
        ) from error


def _of_one_trajectory(key: str, field: str) -> None:
    if is_gateway_assigned(key):
        raise Unprocessable(
            f"{field}: {key} is a key that the gateway made, it may hold many trajectories. "
            "Say which one by step_id, a step of it",
            field,
        )


def public_url(gateway: GatewaySettings, request: Request) -> str:
    """Return the start of the base URLs given to agents, without a trailing slash."""
    if gateway.public_url is not None:
        return gateway.public_url.rstrip("/")
    return str(request.base_url).rstrip("/") + gateway.base_path


def control_routes(services: Services) -> APIRouter:
    """Return the routes of sessions, trajectories, rewards and curations."""
    router, recorder = APIRouter(), Recorder(services)
    authenticator, trajectories = services.authenticator, services.trajectories

    def principal_with(scope: Scope) -> Any:
        """Authenticate the caller and check its scope before the body is read."""

        async def authenticate(request: Request) -> Principal:
            return authenticator.authenticate(header_map(request.scope), scope)

        return Depends(authenticate)

    agent, rewarder, curator = (
        principal_with("agent"),
        principal_with("reward"),
        principal_with("curate"),
    )

    @router.post("/sessions", status_code=201)
    async def open_session(
        request: Request, said: OpenSession | None = None, caller: Principal = agent
    ) -> dict[str, str]:
        said = said or OpenSession()
        key = said.trajectory_key or header_map(request.scope).get(TRAJECTORY_HEADER) or new_ulid()
        _of_one_trajectory(key, "trajectory_key")
        found = trajectories.resolve(
            caller, header_map(request.scope), key, said.group_id, run=said.run_id
        )
        new = replace(found, channel=said.channel or found.channel)
        await recorder.record([recorder.opened(new, said)])
        public = public_url(services.settings.gateway, request)
        return {
            "session_key": authenticator.session_key(
                caller, new.run_id, key, new.group_id, new.channel
            ),
            "trajectory_key": key,
            "base_url": f"{public}/v1",
            "path_base_url": f"{public}/{_quoted(key)}/{_quoted(new.group_id or key)}/v1",
        }

    async def complete(
        request: Request,
        caller: Principal,
        said: Complete | None,
        key: str | None = None,
        group: str | None = None,
    ) -> dict[str, str]:
        said = said or Complete()
        if said.reward is not None:
            authenticator.require_completion_reward(caller)
        if said.step_id is not None:
            key = target_of(key, said.step_id)
        found = trajectories.resolve(caller, header_map(request.scope), key, group)
        await recorder.record(
            recorder.ended(replace(found, channel=said.channel or found.channel), said)
        )
        return {"status": "ok", "trajectory_key": found.trajectory_key}

    @router.post("/sessions/complete")
    async def complete_session(
        request: Request, said: Complete | None = None, caller: Principal = agent
    ) -> dict[str, str]:
        return await complete(request, caller, said)

    @router.post("/complete_trajectory/{trajectory}")
    async def complete_by_key(
        request: Request, trajectory: str, said: Complete | None = None, caller: Principal = agent
    ) -> dict[str, str]:
        return await complete(request, caller, said, trajectory)

    @router.post("/{trajectory}/{prompt}/complete_trajectory")
    @router.post("/{trajectory}/{prompt}/v1/complete_trajectory")
    async def complete_by_path(
        request: Request,
        trajectory: str,
        prompt: str,
        said: Complete | None = None,
        caller: Principal = agent,
    ) -> dict[str, str]:
        return await complete(request, caller, said, trajectory, prompt)

    @router.post("/{trajectory}/{prompt}/register_trajectory")
    @router.post("/{trajectory}/{prompt}/v1/register_trajectory")
    async def register(
        request: Request,
        trajectory: str,
        prompt: str,
        said: Register | None = None,
        caller: Principal = agent,
    ) -> dict[str, str]:
        said = said or Register()
        _of_one_trajectory(trajectory, "trajectory_key")
        found = trajectories.resolve(caller, header_map(request.scope), trajectory, prompt)
        await recorder.record(
            [recorder.opened(replace(found, channel=said.channel or found.channel), said)]
        )
        return {"status": "ok", "trajectory_key": found.trajectory_key}

    @router.post("/rewards", status_code=201)
    async def give_reward(
        request: Request, said: GiveReward, caller: Principal = rewarder
    ) -> dict[str, str]:
        if said.value is None and not said.reason:
            raise Unprocessable("reason: says why there is no value, or give a value", "reason")
        key = target_of(said.trajectory_id, said.step_id)
        found = trajectories.resolve(caller, header_map(request.scope), key, run=said.run_id)
        await recorder.record([recorder.reward(found, said, by=caller.name)])
        return {"status": "ok", "trajectory_key": key}

    @router.post("/curations", status_code=201)
    async def curate(request: Request, said: Curate, caller: Principal = curator) -> dict[str, str]:
        if all(v is None for v in (said.quality, said.trainable, said.tags, said.note)):
            raise Unprocessable("quality: or trainable, tags or note must say something", "quality")
        by = said.by or caller.name
        if by is None:
            raise Unprocessable("by: says who marks it, where no API key does", "by")
        key = target_of(said.trajectory_id, said.step_id)
        found = trajectories.resolve(caller, header_map(request.scope), key, run=said.run_id)
        event_id = new_event_id()
        await recorder.record([recorder.curation(found, said, by, event_id)])
        return {"status": "ok", "trajectory_key": key, "event_id": event_id}

    return router


def _quoted(segment: str) -> str:
    return quote(segment, safe="@:=+~")

"""Everything that is not a model call: sessions, registering and completing trajectories, rewards.

Each is answered only after its records are durable. Event ids are functions of what is said, so a client that repeats a request
adds nothing. Whether a trajectory exists is not judged here: a record for an unknown one becomes a dead letter of assemble.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from ulid import ULID

from gateway.bus import Message
from gateway.calls import Parts
from gateway.errors import BadRequest, Unprocessable, WrongKey
from gateway.sessions import Origin, bearer_of, checked, origin_of
from schemas.errors import InvalidId
from schemas.events import Channel, Reward, RewardSource, SessionEvent
from schemas.ids import check_trajectory_key, key_of_step, stable_id

STEP_ID = re.compile(r".+~[0-9A-HJKMNP-TV-Z]{26}\.\d{1,9}")
MAX_REWARD = 1e6
Value = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=200)]
Reason = Annotated[str, Field(max_length=2000)]
Size = Annotated[int, Field(ge=1, le=100_000, strict=True)]
Round = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenSession(_Body):
    """A new session. trajectory_key: default a fresh one. metadata: what reward functions need to know of the task."""

    run_id: str | None = None
    group_id: str | None = None
    group_size: Size | None = None
    round: Round | None = None
    channel: Channel | None = None
    trajectory_key: str | None = None
    metadata: dict[str, Any] | None = None


class Register(_Body):
    """Tells about a trajectory before its first call."""

    channel: Channel | None = None
    group_size: Size | None = None
    round: Round | None = None
    metadata: dict[str, Any] | None = None


class Complete(_Body):
    """The trajectory is over. reward: its reward from the environment, if there is one."""

    reward: Value | None = None
    outcome: Literal["completed", "failed", "abandoned"] = "completed"
    reason: Reason | None = None
    channel: Channel | None = None


class GiveReward(_Body):
    """A reward of a trajectory or, with step_id, of a step. value null: explicitly none, with the reason."""

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


def _json(value: Any) -> bytes | None:
    return None if value is None else orjson.dumps(value)


class Recorder:
    """Session events and rewards onto the log."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._topics = parts.settings.kafka.topics

    def opened(self, origin: Origin, said: OpenSession | Register) -> Message:
        """The trajectory's opening; a repeated one is the same event, the first counts."""
        return self._session(
            SessionEvent(
                event_id=stable_id(origin.run_id, origin.trajectory_key, "opened"),
                run_id=origin.run_id,
                trajectory_key=origin.trajectory_key,
                kind="opened",
                group_id=origin.group_id,
                channel=origin.channel,
                group_size=said.group_size,
                round=said.round,
                metadata_json=_json(said.metadata),
                created_at=self._parts.clock.micros(),
            )
        )

    def ended(self, origin: Origin, said: Complete) -> list[Message]:
        """Its reward, if it has one, and its end."""
        event = SessionEvent(
            event_id=stable_id(origin.run_id, origin.trajectory_key, said.outcome),
            run_id=origin.run_id,
            trajectory_key=origin.trajectory_key,
            kind=said.outcome,
            group_id=origin.group_id,
            channel=origin.channel,
            reason=said.reason,
            created_at=self._parts.clock.micros(),
        )
        if said.reward is None:
            return [self._session(event)]
        reward = GiveReward(source="env", name="complete_trajectory", function_version="1", value=said.reward)
        return [self.reward(origin, reward), self._session(event)]

    def reward(self, origin: Origin, said: GiveReward) -> Message:
        """A reward; the same one said twice is one event."""
        target, parts = said.step_id or "", (said.source, said.name, said.function_version)
        event = Reward(
            event_id=stable_id(
                origin.run_id, origin.trajectory_key, "reward", target, *parts,
                str(said.reward_revision), repr(said.value), said.reason or "",
            ),
            run_id=origin.run_id,
            trajectory_key=origin.trajectory_key,
            step_id=said.step_id,
            source=said.source,
            name=said.name,
            function_version=said.function_version,
            value=said.value,
            reason=said.reason,
            reward_revision=said.reward_revision,
            by=said.by,
            detail_json=_json(said.detail),
            created_at=self._parts.clock.micros(),
        )  # fmt: skip
        return Message(self._topics.rewards, origin.kafka_key, self._parts.codec.encode(event))

    def _session(self, event: SessionEvent) -> Message:
        return Message(self._topics.steps, event.trajectory_key.encode(), self._parts.codec.encode(event))

    async def record(self, messages: Sequence[Message]) -> None:
        """Durable when it returns. Raises NotRecorded."""
        await self._parts.journal.record(messages)


def reward_target(said: GiveReward) -> str:
    """Trajectory key of what a reward is about. Raises Unprocessable that names the field."""
    if said.value is None and not said.reason:
        raise Unprocessable("reason: says why there is no value, or give a value", "reason")
    try:
        if said.step_id is not None:
            if not STEP_ID.fullmatch(said.step_id):
                raise Unprocessable(f"step_id: {said.step_id[:80]!r} is not <trajectory>~<ulid>.<choice>", "step_id")
            key = key_of_step(said.step_id)
            if said.trajectory_id not in (None, key):
                raise Unprocessable(f"step_id: a step of {key}, not of trajectory_id", "step_id")
            return key
        if said.trajectory_id is None:
            raise Unprocessable("trajectory_id: or step_id must say what the reward is about", "trajectory_id")
        return check_trajectory_key(said.trajectory_id)
    except InvalidId as error:
        raise Unprocessable(str(error), "step_id" if said.step_id is not None else "trajectory_id") from error


def control_routes(parts: Parts) -> APIRouter:
    """Routes of sessions, trajectories and rewards."""
    router, recorder = APIRouter(), Recorder(parts)
    default_run = parts.settings.run_id

    def origin(
        request: Request, key: str | None = None, group: str | None = None, channel: Channel | None = None
    ) -> Origin:
        found = origin_of(dict(request.headers), parts.keys, default_run, key, group)
        return Origin(found.run_id, found.trajectory_key, found.group_id, channel or found.channel)

    @router.post("/sessions", status_code=201)
    async def open_session(request: Request, said: OpenSession | None = None) -> dict[str, str]:
        said = said or OpenSession()
        key = said.trajectory_key or str(ULID())
        run = said.run_id or request.headers.get("x-clawstream-run") or default_run
        new = checked(run, key, said.group_id, said.channel)
        await recorder.record([recorder.opened(new, said)])
        public = (parts.settings.gateway.public_url or str(request.base_url)).rstrip("/")
        return {
            "session_key": parts.keys.mint(new),
            "trajectory_key": key,
            "base_url": f"{public}/v1",
            "path_base_url": f"{public}/{_quoted(key)}/{_quoted(said.group_id or key)}/v1",
        }

    async def complete(who: Origin, said: Complete | None) -> dict[str, str]:
        await recorder.record(recorder.ended(who, said or Complete()))
        return {"status": "ok", "trajectory_key": who.trajectory_key}

    @router.post("/sessions/complete")
    async def complete_session(request: Request, said: Complete | None = None) -> dict[str, str]:
        if bearer_of(dict(request.headers)) is None:
            raise WrongKey("this path needs a session key as bearer token: POST /sessions gives one", "authorization")
        return await complete(origin(request, channel=said.channel if said else None), said)

    @router.post("/complete_trajectory/{trajectory}")
    async def complete_by_key(request: Request, trajectory: str, said: Complete | None = None) -> dict[str, str]:
        return await complete(origin(request, trajectory, channel=said.channel if said else None), said)

    @router.post("/{trajectory}/{prompt}/complete_trajectory")
    @router.post("/{trajectory}/{prompt}/v1/complete_trajectory")
    async def complete_by_path(
        request: Request, trajectory: str, prompt: str, said: Complete | None = None
    ) -> dict[str, str]:
        return await complete(origin(request, trajectory, prompt, said.channel if said else None), said)

    @router.post("/{trajectory}/{prompt}/register_trajectory")
    @router.post("/{trajectory}/{prompt}/v1/register_trajectory")
    async def register(request: Request, trajectory: str, prompt: str, said: Register | None = None) -> dict[str, str]:
        said = said or Register()
        who = origin(request, trajectory, prompt, said.channel)
        await recorder.record([recorder.opened(who, said)])
        return {"status": "ok", "trajectory_key": who.trajectory_key}

    _add_rewards(router, parts, recorder)
    return router


def _add_rewards(router: APIRouter, parts: Parts, recorder: Recorder) -> None:
    @router.post("/rewards", status_code=201)
    async def give_reward(request: Request, said: GiveReward) -> dict[str, str]:
        key = reward_target(said)
        found = origin_of(dict(request.headers), parts.keys, parts.settings.run_id, key)
        if said.run_id is not None:
            if bearer_of(dict(request.headers)) is not None and said.run_id != found.run_id:
                raise BadRequest("run_id: not the run of the session key", "run_id")
            found = checked(said.run_id, key, found.group_id, found.channel)
        await recorder.record([recorder.reward(found, said)])
        return {"status": "ok", "trajectory_key": key}


def _quoted(segment: str) -> str:
    return quote(segment, safe="@:=+~")

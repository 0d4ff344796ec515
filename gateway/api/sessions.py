"""Serves sessions, and the registration and completion of trajectories.

Each request is answered only after its records are durable. These routes do not check whether a
trajectory exists: assemble dead-letters a record of an unknown one.
"""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request

from clawstream.gateway.api.bodies import Complete, OpenSession, Register, in_openapi
from clawstream.gateway.api.dependencies import Segment, body_of, principal_with, public_url
from clawstream.gateway.api.recorder import Recorder
from clawstream.gateway.api.targets import check_one_trajectory, target_of
from clawstream.gateway.asgi.messages import header_map
from clawstream.gateway.attribution.resolver import TRAJECTORY_HEADER
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.proxy.services import Services
from clawstream.schemas.ids import new_ulid


def session_routes(services: Services) -> APIRouter:
    """Return the routes."""
    router, recorder = APIRouter(), Recorder(services)
    authenticator, trajectories = services.authenticator, services.trajectories
    agent = principal_with(services, "agent")
    opening, ending = in_openapi(OpenSession), in_openapi(Complete)
    session_body = body_of(services, OpenSession, agent)
    complete_body = body_of(services, Complete, agent)
    register_body = body_of(services, Register, agent)

    @router.post("/sessions", status_code=201, openapi_extra=opening)
    async def open_session(
        request: Request, caller: Principal = agent, body: OpenSession = session_body
    ) -> dict[str, str]:
        headers = header_map(request.scope)
        key = body.trajectory_key or headers.get(TRAJECTORY_HEADER) or new_ulid()
        check_one_trajectory(key, "trajectory_key")
        ref = trajectories.resolve(
            caller, headers, key, body.group_id, run=body.run_id, channel=body.channel
        )
        await recorder.record([recorder.opened(ref, body)])
        url, group = public_url(services.settings.gateway, request), ref.group_id or key
        return {
            "session_key": authenticator.session_key(
                caller, ref.run_id, key, ref.group_id, ref.channel
            ),
            "trajectory_key": key,
            "base_url": f"{url}/v1",
            "path_base_url": f"{url}/{_quoted(key)}/{_quoted(group)}/v1",
        }

    async def complete(
        request: Request,
        caller: Principal,
        body: Complete,
        key: str | None = None,
        group: str | None = None,
    ) -> dict[str, str]:
        if body.reward is not None or body.rewards:
            authenticator.require_completion_reward(caller)
        if body.step_id is not None:
            key = target_of(key, body.step_id)
        ref = trajectories.resolve(
            caller, header_map(request.scope), key, group, channel=body.channel
        )
        await recorder.record(recorder.ended(ref, body))
        return {"status": "ok", "trajectory_key": ref.trajectory_key}

    @router.post("/sessions/complete", openapi_extra=ending)
    async def complete_session(
        request: Request, caller: Principal = agent, body: Complete = complete_body
    ) -> dict[str, str]:
        return await complete(request, caller, body)

    @router.post("/complete_trajectory/{trajectory}", openapi_extra=ending)
    async def complete_by_key(
        request: Request,
        trajectory: Segment,
        caller: Principal = agent,
        body: Complete = complete_body,
    ) -> dict[str, str]:
        return await complete(request, caller, body, trajectory)

    @router.post("/{trajectory}/{prompt}/complete_trajectory", openapi_extra=ending)
    @router.post("/{trajectory}/{prompt}/v1/complete_trajectory", openapi_extra=ending)
    async def complete_by_path(
        request: Request,
        trajectory: Segment,
        prompt: Segment,
        caller: Principal = agent,
        body: Complete = complete_body,
    ) -> dict[str, str]:
        return await complete(request, caller, body, trajectory, prompt)

    @router.post("/{trajectory}/{prompt}/register_trajectory", openapi_extra=in_openapi(Register))
    @router.post(
        "/{trajectory}/{prompt}/v1/register_trajectory", openapi_extra=in_openapi(Register)
    )
    async def register(
        request: Request,
        trajectory: Segment,
        prompt: Segment,
        caller: Principal = agent,
        body: Register = register_body,
    ) -> dict[str, str]:
        check_one_trajectory(trajectory, "trajectory_key")
        ref = trajectories.resolve(
            caller, header_map(request.scope), trajectory, prompt, channel=body.channel
        )
        await recorder.record([recorder.opened(ref, body)])
        return {"status": "ok", "trajectory_key": ref.trajectory_key}

    return router


def _quoted(segment: str) -> str:
    return quote(segment, safe="@:=+~")

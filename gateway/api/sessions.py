"""Serves sessions, and the registration and completion of trajectories.

Each request is answered only after its records are durable. These routes do not check whether a
trajectory exists: assemble dead-letters a record of an unknown one.
"""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request

from gateway.api.bodies import Complete, OpenSession, Register
from gateway.api.dependencies import principal_with, public_url
from gateway.api.recorder import Recorder
from gateway.api.targets import check_one_trajectory, target_of
from gateway.asgi.messages import header_map
from gateway.attribution.resolver import TRAJECTORY_HEADER
from gateway.auth.authenticator import Principal
from gateway.proxy.services import Services
from schemas.ids import new_ulid


def session_routes(services: Services) -> APIRouter:
    """Return the routes."""
    router, recorder = APIRouter(), Recorder(services)
    authenticator, trajectories = services.authenticator, services.trajectories
    agent = principal_with(authenticator, "agent")

    @router.post("/sessions", status_code=201)
    async def open_session(
        request: Request, body: OpenSession | None = None, caller: Principal = agent
    ) -> dict[str, str]:
        body, headers = body or OpenSession(), header_map(request.scope)
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
        body: Complete | None,
        key: str | None = None,
        group: str | None = None,
    ) -> dict[str, str]:
        body = body or Complete()
        if body.reward is not None or body.rewards:
            authenticator.require_completion_reward(caller)
        if body.step_id is not None:
            key = target_of(key, body.step_id)
        ref = trajectories.resolve(
            caller, header_map(request.scope), key, group, channel=body.channel
        )
        await recorder.record(recorder.ended(ref, body))
        return {"status": "ok", "trajectory_key": ref.trajectory_key}

    @router.post("/sessions/complete")
    async def complete_session(
        request: Request, body: Complete | None = None, caller: Principal = agent
    ) -> dict[str, str]:
        return await complete(request, caller, body)

    @router.post("/complete_trajectory/{trajectory}")
    async def complete_by_key(
        request: Request, trajectory: str, body: Complete | None = None, caller: Principal = agent
    ) -> dict[str, str]:
        return await complete(request, caller, body, trajectory)

    @router.post("/{trajectory}/{prompt}/complete_trajectory")
    @router.post("/{trajectory}/{prompt}/v1/complete_trajectory")
    async def complete_by_path(
        request: Request,
        trajectory: str,
        prompt: str,
        body: Complete | None = None,
        caller: Principal = agent,
    ) -> dict[str, str]:
        return await complete(request, caller, body, trajectory, prompt)

    @router.post("/{trajectory}/{prompt}/register_trajectory")
    @router.post("/{trajectory}/{prompt}/v1/register_trajectory")
    async def register(
        request: Request,
        trajectory: str,
        prompt: str,
        body: Register | None = None,
        caller: Principal = agent,
    ) -> dict[str, str]:
        body = body or Register()
        check_one_trajectory(trajectory, "trajectory_key")
        ref = trajectories.resolve(
            caller, header_map(request.scope), trajectory, prompt, channel=body.channel
        )
        await recorder.record([recorder.opened(ref, body)])
        return {"status": "ok", "trajectory_key": ref.trajectory_key}

    return router


def _quoted(segment: str) -> str:
    return quote(segment, safe="@:=+~")

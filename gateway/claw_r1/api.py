"""Serve Claw-R1's HTTP API for white-box agents.

Routes: /submit_steps, /compute_reward, /init_trajectory. /generate is a model call: `generator`.
`clawstream.gateway.api.sessions` serves the other routes of its black-box agents
(register_trajectory, complete_trajectory). docs/claw-r1.md lists each route with the differences
and their reasons.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request

from clawstream.gateway.api.bodies import in_openapi, read_as
from clawstream.gateway.api.dependencies import principal_with, public_url
from clawstream.gateway.asgi.messages import header_map
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.claw_r1.reward import ComputeReward, RewardFunction, TextOf
from clawstream.gateway.claw_r1.steps import Submission
from clawstream.gateway.claw_r1.submitter import Submitter
from clawstream.gateway.proxy.services import Services, held_body
from clawstream.schemas.records import Channel
from clawstream.schemas.settings import GatewaySettings


def claw_r1_routes(services: Services) -> APIRouter:
    """Return the routes.

    Raises:
        SettingsError: The reward function or the tokenizer of the settings does not exist.
    """
    gateway = services.settings.gateway
    text_of = _text_of(gateway)
    reward_function = RewardFunction(services.settings, text_of)
    submitter = Submitter(services, text_of)
    agent = principal_with(services, "agent")

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        yield
        reward_function.close()
        submitter.close()

    router = APIRouter(lifespan=lifespan)

    @router.post("/submit_steps", openapi_extra=in_openapi(Submission))
    async def submit_steps(
        request: Request, channel: Channel | None = None, caller: Principal = agent
    ) -> dict[str, int]:
        headers = header_map(request.scope)
        async with held_body(request.receive, services) as body:
            return {"accepted": await submitter.submit(caller, headers, body, channel)}

    @router.post("/compute_reward", openapi_extra=in_openapi(ComputeReward))
    async def compute_reward(request: Request, caller: Principal = agent) -> dict[str, Any]:
        async with held_body(request.receive, services) as body:
            payload = read_as(ComputeReward, body)
            run = services.trajectories.run_of(caller, header_map(request.scope))
            return await reward_function.score(payload, run)

    @router.post("/init_trajectory")
    async def init_trajectory(request: Request, _: Principal = agent) -> dict[str, str]:
        uid = uuid.uuid4().hex
        return {"trajectory_uid": uid, "base_url": f"{public_url(gateway, request)}/{uid}/{uid}/v1"}

    return router


def _text_of(gateway: GatewaySettings) -> TextOf | None:
    if gateway.tokenizer_path is None:
        return None
    from clawstream.gateway.claw_r1 import tokenizer  # only this module needs the library

    return tokenizer.TextOf(gateway.tokenizer_path)

"""Serves POST /rewards. It does not check whether the trajectory exists, as in `sessions`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from clawstream.gateway.api.bodies import GiveReward, in_openapi
from clawstream.gateway.api.dependencies import body_of, principal_with
from clawstream.gateway.api.recorder import Recorder
from clawstream.gateway.api.targets import target_of
from clawstream.gateway.asgi.messages import header_map
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.errors import Unprocessable
from clawstream.gateway.proxy.services import Services


def reward_routes(services: Services) -> APIRouter:
    """Return the route."""
    router, recorder = APIRouter(), Recorder(services)
    rewarder = principal_with(services, "reward")
    reward_body = body_of(services, GiveReward, rewarder)

    @router.post("/rewards", status_code=201, openapi_extra=in_openapi(GiveReward))
    async def give_reward(
        request: Request, caller: Principal = rewarder, body: GiveReward = reward_body
    ) -> dict[str, str]:
        if body.value is None and not body.reason:
            raise Unprocessable("reason: says why there is no value, or give a value", "reason")
        key = target_of(body.trajectory_id, body.step_id)
        headers = header_map(request.scope)
        ref = services.trajectories.resolve(caller, headers, key, run=body.run_id)
        await recorder.record([recorder.reward(ref, body, by=caller.name)])
        return {"status": "ok", "trajectory_key": key}

    return router

"""Serves POST /curations. It does not check whether the trajectory exists, as in `sessions`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from clawstream.gateway.api.bodies import Curate, in_openapi
from clawstream.gateway.api.dependencies import body_of, principal_with
from clawstream.gateway.api.recorder import Recorder
from clawstream.gateway.api.targets import target_of
from clawstream.gateway.asgi.messages import header_map
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.errors import Unprocessable
from clawstream.gateway.proxy.services import Services
from clawstream.schemas.ids import new_event_id


def curation_routes(services: Services) -> APIRouter:
    """Return the route."""
    router, recorder = APIRouter(), Recorder(services)
    curator = principal_with(services, "curate")
    curate_body = body_of(services, Curate, curator)

    @router.post("/curations", status_code=201, openapi_extra=in_openapi(Curate))
    async def curate(
        request: Request, caller: Principal = curator, body: Curate = curate_body
    ) -> dict[str, str]:
        silent = all(v is None for v in (body.quality, body.trainable, body.tags))
        if body.takes_back is not None and not silent:
            raise Unprocessable(
                "takes_back: goes without quality, trainable and tags", "takes_back"
            )
        if body.takes_back is None and silent and body.note is None:
            raise Unprocessable("quality: or trainable, tags or note must say something", "quality")
        by = body.by or caller.name
        if by is None:
            raise Unprocessable("by: names the author, where no API key does", "by")
        key = target_of(body.trajectory_id, body.step_id)
        headers = header_map(request.scope)
        ref = services.trajectories.resolve(caller, headers, key, run=body.run_id)
        event_id = new_event_id()
        await recorder.record([recorder.curation(ref, body, by, event_id)])
        return {"status": "ok", "trajectory_key": key, "event_id": event_id}

    return router

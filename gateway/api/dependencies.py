"""Values that several routers need from a request: the caller, the body, the gateway's own URL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Depends, Request
from pydantic import AfterValidator, BaseModel

from clawstream.gateway.api.bodies import read_as
from clawstream.gateway.asgi.messages import HeldBody, header_map
from clawstream.gateway.auth.api_keys import Scope
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.proxy.services import Services
from clawstream.schemas.settings import GatewaySettings

MAX_CONTROL_BODY = 1 << 20
"""Maximum bytes of a control request, e.g. metadata and reward details."""
Segment = Annotated[str, AfterValidator(unquote)]
"""A segment of a path: its slashes are escaped until here, see `proxy.paths.canonical`."""


def principal_with(services: Services, scope: Scope) -> Any:
    """Return the default of a parameter: the authenticated caller.

    FastAPI reads a body that is a parameter of the endpoint before this. So no endpoint has one;
    see `body_of`.
    """

    async def authenticate(request: Request) -> Principal:
        return services.admit(request.scope, header_map(request.scope), scope)

    return Depends(authenticate)


def body_of(services: Services, model: type[BaseModel], caller: Any) -> Any:
    """Return the default of a parameter: the body, which is in flight until the reply.

    An empty body is an empty object.

    Args:
        services: Counts the body.
        model: Type of the body.
        caller: Result of `principal_with`; nothing is read before it.
    """

    async def read(request: Request, _: Principal = caller) -> AsyncIterator[BaseModel]:
        async with HeldBody(request.receive, MAX_CONTROL_BODY, services.in_flight, "") as body:
            yield read_as(model, body or b"{}")

    return Depends(read)


def public_url(gateway: GatewaySettings, request: Request) -> str:
    """Return the start of the base URLs given to agents, without a trailing slash."""
    if gateway.public_url is not None:
        return gateway.public_url.rstrip("/")
    return str(request.base_url).rstrip("/") + gateway.base_path

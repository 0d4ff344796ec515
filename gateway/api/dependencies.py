"""Values that several routers need from a request: the caller, and the gateway's own URL."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from gateway.asgi.messages import header_map
from gateway.auth.api_keys import Scope
from gateway.auth.authenticator import Authenticator, Principal
from schemas.settings import GatewaySettings


def principal_with(authenticator: Authenticator, scope: Scope) -> Any:
    """Return the default of a parameter: the authenticated caller, checked before the body."""

    async def authenticate(request: Request) -> Principal:
        return authenticator.authenticate(header_map(request.scope), scope)

    return Depends(authenticate)


def public_url(gateway: GatewaySettings, request: Request) -> str:
    """Return the start of the base URLs given to agents, without a trailing slash."""
    if gateway.public_url is not None:
        return gateway.public_url.rstrip("/")
    return str(request.base_url).rstrip("/") + gateway.base_path

"""What routes get from a request besides its fields: the application's parts, and its key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import Depends, Request

from clawstream.schemas.errors import ForeseenError


def _parts(request: Request) -> Any:
    return request.app.state.parts


def _permitted(request: Request) -> Callable[[AsyncIterator[None]], AsyncIterator[None]]:
    async def permitted(changes: AsyncIterator[None]) -> AsyncIterator[None]:
        async for _ in changes:
            try:
                if request.state.user_now() is None:
                    return
            except ForeseenError:  # of the keys: the browser connects again
                return
            yield

    return permitted


Used = Annotated[Any, Depends(_parts)]
"""`clawstream.inspector.web.app.Parts`."""
Permitted = Annotated[Callable[[AsyncIterator[None]], AsyncIterator[None]], Depends(_permitted)]
"""Passes changes on until the key of the request is revoked, or its session ends."""

"""What routes get from a request besides its fields: the parts of the application."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request


def _parts(request: Request) -> Any:
    return request.app.state.parts


Used = Annotated[Any, Depends(_parts)]
"""`inspector.web.app.Parts`."""

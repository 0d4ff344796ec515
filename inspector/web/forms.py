"""Read forms that browsers send, and addresses that they name."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Depends, HTTPException, Request

BODY_BYTES = 65_536
"""Longest body of a form."""


async def _form_of(request: Request) -> dict[str, str]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise HTTPException(413, f"a form has at most {BODY_BYTES} bytes")
    return {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


Form = Annotated[dict[str, str], Depends(_form_of)]
"""The fields of a form that are not empty."""


def local(target: str | None) -> str:
    """Return a path of this site; `/` for any other address."""
    target = target or "/"
    ours = target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if ours and target.isprintable() else "/"

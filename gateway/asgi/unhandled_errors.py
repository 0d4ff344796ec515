"""Errors that nobody foresaw: bugs. A 500 in the usual shape, and a line in the log that says where.

The log gets the kind of the error and the places it went through, never its message: that may hold a client's own text.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from traceback import walk_tb
from typing import Any

from gateway.asgi.client_disconnect import Receive
from gateway.asgi.error_replies import reply_of
from gateway.asgi.messages import App, Scope, Send, send_reply
from gateway.errors import GatewayError
from runtime.logs import logger

PLACES = 8
"""So many are logged, the innermost last."""


class UnhandledErrors:
    """ASGI middleware, the outermost: web framework and server would log the error with its message."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (
            Exception
        ) as error:  # the outermost: behind it is the server, which would log the message
            if scope["type"] != "http":
                raise
            places = [
                f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(error.__traceback__)
            ]
            logger().error(
                "request_failed",
                path=scope["path"],
                error=type(error).__name__,
                at=places[-PLACES:],
            )
            if started:  # the server breaks the connection off
                raise GatewayError("internal error within a reply") from None
            await send_reply(send, reply_of(GatewayError("internal error, see the gateway's log")))

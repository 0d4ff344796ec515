"""Handles unexpected errors: replies 500 and logs where the error occurred.

The log line has the error type and stack locations, never the message, which may contain text of a
client.
"""

from __future__ import annotations

from traceback import walk_tb

from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.error_replies import reply_of
from clawstream.gateway.asgi.messages import App, Scope, Send, send_reply
from clawstream.gateway.errors import GatewayError
from clawstream.runtime.logs import logger

UNFORESEEN = GatewayError("internal error, see the gateway's log")
MAX_LOCATIONS = 8
"""Maximum number of logged stack locations, innermost last."""


class UnhandledErrors:
    """Outermost ASGI middleware; framework and server would log the error message."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # the server would log the message
            if scope["type"] != "http":
                raise
            locations = [
                f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(error.__traceback__)
            ]
            logger().error(
                "request_failed",
                path=scope["path"],
                error=type(error).__name__,
                at=locations[-MAX_LOCATIONS:],
            )
            try:
                await send_reply(send, reply_of(UNFORESEEN))
            except RuntimeError:  # a reply has started: the server closes the connection
                raise GatewayError("internal error within a reply") from None

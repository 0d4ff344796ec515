"""Requests that only pass through to an engine: it samples nothing, so nothing is recorded."""

from __future__ import annotations

from gateway.calls import FORWARDED, RETURNED, Parts, Scope, Send, credentials_of, header_map, read_body, send_reply
from gateway.disconnect import Client, Receive
from gateway.door import Caller
from gateway.error_reply import Reply, reply_of
from gateway.errors import ClientGone, GatewayError
from gateway.memory import Held
from gateway.protocol import Errors
from gateway.request_body import model_of, object_of


class PassEndpoint:
    """A method and a path of the engines. errors: of the protocol it belongs to."""

    def __init__(self, parts: Parts, method: str, path: str, errors: Errors) -> None:
        self._parts, self.method, self._path, self._errors = parts, method, path, errors

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, trajectory: str | None = None, prompt: str | None = None
    ) -> None:
        """Serve one, as an ASGI application does. trajectory, prompt: of the path, if it has them."""
        memory = self._parts.memory
        held = memory.replies.hold()
        try:
            try:
                memory.replies.check()
                reply = await self._asked(header_map(scope), receive, held, trajectory, prompt)
            except ClientGone:
                return
            except GatewayError as error:
                reply = reply_of(error, self._errors)
            await send_reply(send, reply)
        finally:
            held.release()

    async def _asked(
        self, headers: dict[str, str], receive: Receive, held: Held, trajectory: str | None, prompt: str | None
    ) -> Reply:
        parts = self._parts
        caller = parts.door.authenticate(headers, "agent")
        body = await read_body(receive, parts.settings.gateway.max_body_bytes, parts.memory)
        try:
            client = Client(receive)
            try:
                async with client:
                    return await self._passed(caller, headers, body, held, trajectory, prompt)
            finally:
                client.done()
        finally:
            parts.memory.give_back(len(body))

    async def _passed(
        self,
        caller: Caller,
        headers: dict[str, str],
        body: bytes,
        held: Held,
        trajectory: str | None,
        prompt: str | None,
    ) -> Reply:
        parts = self._parts
        origin = parts.door.origin(caller, headers, trajectory, prompt, {})
        model = model_of(object_of(body)) if self.method == "POST" else None
        forwarded = {k: v for k, v in headers.items() if k in FORWARDED}
        if body:
            forwarded["content-type"] = "application/json"
        async with parts.upstream.ask(
            self.method, self._path, body or None, forwarded,
            key=origin.trajectory_key, run_id=origin.run_id, model=model, credentials=credentials_of(headers),
        ) as response:  # fmt: skip
            content = await response.read(held)
            if response.status >= 400:
                content = self._errors.engine(response.status, content)
            told = [(n.encode(), v.encode("latin-1")) for n in RETURNED if (v := response.header(n)) is not None]
            return Reply(response.status, [*told, (b"content-length", b"%d" % len(content))], content)

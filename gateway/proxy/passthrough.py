"""Requests that only pass through to an engine: nothing of them is recorded."""

from __future__ import annotations

from urllib.parse import quote

from gateway.asgi.client_disconnect import Client, Receive
from gateway.asgi.error_replies import Errors, Reply, reply_of
from gateway.asgi.in_flight_limits import Held
from gateway.asgi.messages import Scope, Send, header_map, send_reply
from gateway.attribution.resolver import Caller
from gateway.auth.key_limits import tokens_of_reply
from gateway.errors import BadRequest, ClientGone, GatewayError
from gateway.protocols.request_fields import model_of, object_of, with_whole_characters
from gateway.proxy.call import Parts, held_body
from gateway.proxy.forwarding import FORWARDED, credentials_of, returned, with_query
from gateway.proxy.paths import Place


class PassEndpoint:
    """A method and a path of the engines. errors: of the protocol it belongs to."""

    def __init__(self, parts: Parts, method: str, path: str, errors: Errors) -> None:
        self._parts, self.method, self._path, self._errors = parts, method, path, errors

    async def serve(self, scope: Scope, receive: Receive, send: Send, place: Place) -> None:
        """Serve one, as an ASGI application does."""
        memory = self._parts.memory
        held = memory.replies.hold()
        try:
            try:
                memory.replies.check()
                reply = await self._asked(scope, receive, held, place)
            except ClientGone:
                return
            except GatewayError as error:
                reply = reply_of(error, self._errors)
            await send_reply(send, reply)
        finally:
            held.release()

    async def _asked(self, scope: Scope, receive: Receive, held: Held, place: Place) -> Reply:
        parts, headers = self._parts, header_map(scope)
        caller = parts.door.authenticate(headers, "agent")
        with parts.limits.call(caller.key) as counted:
            async with held_body(receive, parts) as body:
                client = Client(receive)
                try:
                    async with client:
                        path = with_query(
                            self._path + quote(place.item, safe="/:@!$&'()*+,;="),
                            scope["query_string"],
                        )
                        reply = await self._passed(caller, headers, path, body, held, place)
                finally:
                    client.done()
            # a GET repeats a reply whose tokens counted when it was made
            if counted.counts_tokens and self.method == "POST" and reply.status < 400:
                counted.tokens = tokens_of_reply(reply.body)
            return reply

    async def _passed(
        self,
        caller: Caller,
        headers: dict[str, str],
        path: str,
        body: bytes,
        held: Held,
        place: Place,
    ) -> Reply:
        parts = self._parts
        origin = parts.door.origin(caller, headers, place.trajectory, place.prompt, {})
        model = place.item if place.tail == "/models/" else None
        if self.method == "POST":
            try:
                said = object_of(body)
            except BadRequest:
                body = with_whole_characters(body)
                said = object_of(body)
            model = model_of(said)
        forwarded = {k: v for k, v in headers.items() if k in FORWARDED}
        if body:
            forwarded["content-type"] = "application/json"
        async with parts.upstream.ask(
            self.method, path, body or None, forwarded,
            key=origin.trajectory_key, run_id=origin.run_id, model=model, credentials=credentials_of(headers),
        ) as response:  # fmt: skip
            content = await response.read(held)
            told = returned(response.headers)
            if response.encoding is not None:
                told.append((b"content-encoding", response.encoding.encode("latin-1")))
            elif response.status >= 400:
                content = self._errors.engine(response.status, content)
            if (kind := response.header("content-type")) is not None:
                told.append((b"content-type", kind.encode("latin-1")))
            return Reply(
                response.status, [*told, (b"content-length", b"%d" % len(content))], content
            )

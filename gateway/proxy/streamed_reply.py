"""The reply of a model call that streams."""

from __future__ import annotations

from collections.abc import Sequence

from clawstream.gateway.asgi.messages import Headers
from clawstream.gateway.capture.steps import has_text
from clawstream.gateway.capture.stream import EventStream
from clawstream.gateway.engines.client import EngineCall
from clawstream.gateway.errors import (
    ClientGone,
    GatewayError,
    NotRecorded,
    UpstreamFailed,
    UpstreamTimeout,
)
from clawstream.gateway.protocols.base import EngineKind
from clawstream.gateway.protocols.reply_fields import EngineError
from clawstream.gateway.proxy.failed_calls import Failure, failure_of, reported_failure
from clawstream.gateway.proxy.forwarding import returned
from clawstream.gateway.proxy.recorded_call import NOTHING, RecordedCall
from clawstream.schemas.records import Step, StepStatus


class StreamedReply:
    """A stream, forwarded up to the first finish reason; the rest waits for the record."""

    def __init__(self, call: RecordedCall, kind: EngineKind) -> None:
        self._call = call
        accumulator = call.adapter.accumulator(call.request, kind)
        self._stream = EventStream(accumulator, call.captured, kind == "captured")
        self._status = 200
        self._headers: Headers = []
        self._began = False

    async def receive(self, reply: EngineCall) -> None:
        """Forward the events of the stream; `EventStream` holds the rest."""
        call, stream = self._call, self._stream
        self._status = reply.status
        self._headers = [
            *returned(reply.headers, call.services.passed),
            (b"content-type", reply.headers.get(b"content-type", b"text/event-stream")),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # for nginx in front of the gateway
        ]
        try:
            async for piece in reply.pieces():
                await call.reply_room.extend(len(piece))
                if out := stream.feed(piece):
                    if not self._began:
                        call.began_streaming()
                        await self._begin(call.step_ids)
                    await call.send_body(out, more=True)
                if stream.ended:
                    await reply.settle()
                    break
            stream.close()
        except (UpstreamFailed, UpstreamTimeout) as error:
            stream.fail(error)

    async def _begin(self, steps: Sequence[str]) -> None:
        self._began = True
        await self._call.start(self._status, self._headers, steps=steps)

    def steps_sent(self) -> list[Step]:
        """Return the steps of the forwarded part."""
        stream = self._stream
        return self._call.steps(stream.sent(), "aborted", stream.unread, self._began)

    async def finish(self) -> str:
        """Record the steps, then send the rest of the stream; return the outcome."""
        call, stream, failure, failed = self._call, self._stream, None, None
        parsed = stream.whole()
        status: StepStatus = "ok" if stream.failure is None else "error"
        # The header that the client has names a step of each choice.
        steps = call.steps(parsed, status, stream.unread, every=self._began)
        if stream.failure is not None and parsed is not None and not self._began:
            steps = [s for s in steps if s.response_token_ids or s.finish_reason or has_text(s)]
        try:
            if steps:
                await call.record(steps)
            else:
                call.count(parsed)
                failure = self._failure(stream.failure or NOTHING)
            last = stream.held()
            if stream.failure is not None or all(step.status == "error" for step in steps):
                failed = "error"
        except NotRecorded as error:
            last, failed, failure = stream.error(error), "not_recorded", failure_of(error)
            steps = []
        return await self._end(last, failure, steps) or failed or call.answered(steps)

    def _failure(self, error: EngineError | GatewayError) -> Failure:
        if isinstance(error, GatewayError):
            return failure_of(error)
        return reported_failure(error, self._status)

    async def _end(self, last: bytes, failure: Failure | None, steps: Sequence[Step]) -> str | None:
        """Send the last part; return "aborted" if the client has left."""
        call = self._call
        try:
            async with call.client:
                if not self._began:
                    await self._begin([step.step_id for step in steps])
                await call.send_body(last)
        except ClientGone:
            return "aborted"
        finally:
            if failure is not None:
                call.failed(failure)
        return None

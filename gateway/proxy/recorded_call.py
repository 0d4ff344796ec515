"""A call whose steps are recorded, and what plain and streamed replies share."""

from __future__ import annotations

from collections.abc import Sequence

from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.messages import Headers, Scope, Send
from clawstream.gateway.auth.key_limits import tokens_of, tokens_of_usage
from clawstream.gateway.capture.steps import steps_of
from clawstream.gateway.capture.unread import Unread
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.base import ParsedReply
from clawstream.gateway.protocols.reply_fields import EngineError
from clawstream.gateway.proxy.client_call import ClientCall
from clawstream.gateway.proxy.failed_calls import Failure
from clawstream.gateway.proxy.paths import CallTarget
from clawstream.gateway.proxy.services import Services
from clawstream.schemas.records import Step, StepStatus

MAX_NAMED = 32
"""Maximum number of step ids in a reply header; clients limit header sizes."""
NOTHING = EngineError("the reply has no choice, no output and no error")


class RecordedCall(ClientCall):
    """A call of one protocol: sends the parts of its reply, and makes its steps durable."""

    def __init__(
        self, services: Services, adapter: ProtocolAdapter, scope: Scope, receive: Receive,
        send: Send, target: CallTarget,
    ) -> None:  # fmt: skip
        super().__init__(services, adapter.name, adapter.errors, scope, receive, send, target)
        self.adapter = adapter

    def failed(self, failure: Failure) -> None:
        """Record the failure. Call it after sending the reply."""
        self.services.failed.record(self, failure)

    async def start(
        self, status: int, headers: Headers, length: int | None = None, steps: Sequence[str] = ()
    ) -> None:
        """Send the head of the reply.

        Args:
            headers: Headers of the engine and of the content. Headers of the gateway are added.
            length: Bytes of the body; None: a stream.
            steps: Ids of the recorded steps.
        """
        headers.append((b"x-clawstream-trajectory", self.trajectory.trajectory_key.encode()))
        if steps:
            headers.append((b"x-clawstream-step", ",".join(steps[:MAX_NAMED]).encode()))
        if len(steps) > MAX_NAMED:
            headers.append((b"x-clawstream-step-count", b"%d" % len(steps)))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_body(self, body: bytes, more: bool = False) -> None:
        """Send a part of the body; within `async with client`: the client may stop reading."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    def began_streaming(self) -> None:
        """Measure the time to the first bytes of a stream."""
        waited_s = self.services.clock.monotonic() - self.began_s
        self.first_token_ms = waited_s * 1000
        self.services.metrics.first_token.observe(waited_s)

    def steps(
        self, parsed: ParsedReply | None, status: StepStatus, unread: Unread | None,
        every: bool = False,
    ) -> list[Step]:  # fmt: skip
        """Build the steps of the reply, see `steps_of`."""
        return steps_of(self, parsed, status, self.services.clock.micros(), unread, every)

    async def record(self, steps: Sequence[Step]) -> None:
        """Make steps durable. Raises NotRecorded."""
        services = self.services
        if self.key_use is not None:
            self.tokens = tokens_of(steps)
        delivery = await services.record_writer.record(steps)
        for step in steps:
            services.metrics.recorded[step.status].inc()
            if self.continues is not None:
                services.continuations.remember(self.continues, step)
            if step.continuation is not None:
                services.metrics.continuations.labels(step.continuation.reason or "kept").inc()
        if delivery == "spooled":
            services.metrics.steps_spooled.inc(len(steps))

    def count(self, parsed: ParsedReply | None) -> None:
        """Count the tokens of a reply of which no step is recorded."""
        self.tokens = tokens_of_usage(parsed.usage if parsed is not None else None)

    def answered(self, steps: Sequence[Step]) -> str:
        """Count the steps of a complete reply and return its outcome."""
        self.services.metrics.steps_answered.inc(sum(s.status == "ok" for s in steps))
        return "answered"

"""Records model calls that end with an error.

Best effort by design: a FailedCall record never delays or fails a reply and is not spooled. While
Kafka is unreachable, or too many records are in flight, the record is counted
(`clawstream_gateway_failed_calls`, `lost`) and dropped. A call that sampled tokens has durable
steps instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from clawstream.gateway.asgi.error_replies import http_error_of
from clawstream.gateway.attribution.resolver import TrajectoryRef, TrajectoryResolver
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.capture.steps import Call
from clawstream.gateway.clock import Clock
from clawstream.gateway.durability.log import LogProducer, Message
from clawstream.gateway.errors import GatewayError
from clawstream.gateway.metrics import Metrics
from clawstream.gateway.protocols.reply_fields import EngineError
from clawstream.gateway.redaction.redactor import Redaction
from clawstream.runtime.logs import logger
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import InvalidId
from clawstream.schemas.ids import check_run_id, new_event_id
from clawstream.schemas.records import FailedCall, FailureSource

MAX_IN_FLIGHT = 1000
"""Maximum number of records waiting for Kafka."""
MESSAGE_CHARS = 2000
TYPE_CHARS = 200
READ_BYTES = 64 * 1024
"""Maximum size of an engine error body that is parsed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause of a failed call. status: HTTP status."""

    source: FailureSource
    status: int
    error_type: str | None
    message: str


def failure_of(error: GatewayError) -> Failure:
    """Describe an error of the gateway."""
    http = http_error_of(error)
    return Failure("gateway", http.status, http.type, error.message)


def reported_failure(error: EngineError, status: int) -> Failure:
    """Describe an error that an engine reported in a reply with this status."""
    return Failure("engine", error.status or status, error.type, error.message)


def engine_failure(status: int, body: bytes) -> Failure:
    """Describe an error reply of an engine, of any format."""
    reply = _read(body)
    error = reply.get("error", reply.get("detail", reply))
    if isinstance(error, dict):
        kind, message = error.get("type"), error.get("message")
        text = message if isinstance(message, str) else _text(body)
        return Failure("engine", status, kind if isinstance(kind, str) else None, text)
    return Failure("engine", status, None, error if isinstance(error, str) else _text(body))


def _read(body: bytes) -> Mapping[str, Any]:
    try:
        parsed = orjson.loads(body) if len(body) <= READ_BYTES else None
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {}


def _text(body: bytes) -> str:
    return body[: 4 * MESSAGE_CHARS].decode(errors="replace")


class FailedCalls:
    """Writes FailedCall records. redaction: None writes them unredacted."""

    def __init__(
        self, topic: str, gateway_id: str, codec: Codec, producer: LogProducer,
        trajectories: TrajectoryResolver,
        redaction: Redaction | None, clock: Clock,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        self._topic, self._gateway_id, self._codec, self._producer = (
            topic,
            gateway_id,
            codec,
            producer,
        )
        self._trajectories, self._redaction, self._clock = trajectories, redaction, clock
        self._recorded, self._lost = (
            metrics.failed_calls.labels(fate) for fate in ("recorded", "lost")
        )
        self._in_flight = 0

    def record(self, call: Call, failure: Failure) -> None:
        """Send a record if the API key of the call was checked. Never waits.

        Call it after sending the reply.
        """
        if call.caller is None:
            return
        if not self._producer.reachable or self._in_flight >= MAX_IN_FLIGHT:
            self._lost.inc()
            return
        ref = call.trajectory if call.call_id is not None else self._ref(call, call.caller)
        try:
            run = (
                ref.run_id
                if ref is not None
                else check_run_id(self._trajectories.run_of(call.caller, call.headers))
            )
        except InvalidId:  # the client named an invalid run
            self._lost.inc()
            return
        self._send(self._record(call, failure, run, ref))

    def _ref(self, call: Call, caller: Principal) -> TrajectoryRef | None:
        """Return the trajectory of the call if path and headers name it."""
        try:
            return self._trajectories.resolve(
                caller, call.headers, call.path_trajectory, call.path_group
            )
        except GatewayError:
            return None

    def _record(
        self, call: Call, failure: Failure, run: str, ref: TrajectoryRef | None
    ) -> FailedCall:
        record = FailedCall(
            event_id=call.call_id or new_event_id(),
            run_id=run,
            trajectory_key=ref.trajectory_key if ref is not None else None,
            group_id=ref.group_id if ref is not None else None,
            channel=ref.channel if ref is not None else None,
            protocol=call.protocol,
            model=_cut(call.model, TYPE_CHARS),
            streamed=call.call_id is not None and call.request.stream,
            source=failure.source,
            status=failure.status,
            error_type=_cut(failure.error_type, TYPE_CHARS),
            message=failure.message[: 4 * MESSAGE_CHARS],
            engine=call.engine,
            idempotency_key=call.idempotency_key,
            retry_count=call.retry_count,
            user_agent=call.user_agent,
            gateway_id=self._gateway_id,
            received_at=call.received_at,
            traceparent=call.traceparent,
            duration_ms=(self._clock.monotonic() - call.began_s) * 1000,
        )
        if self._redaction is not None:
            # Before truncation: no rule finds a truncated secret.
            record = self._redaction.redact_now(record)
        return replace(record, message=record.message[:MESSAGE_CHARS])

    def _send(self, record: FailedCall) -> None:
        key = record.trajectory_key if record.trajectory_key is not None else record.event_id
        self._in_flight += 1
        self._producer.send(
            [Message(self._topic, key.encode(), self._codec.encode(record))], self._sent
        )

    def _sent(self, error: Exception | None) -> None:
        self._in_flight -= 1
        if error is None:
            self._recorded.inc()
        else:
            self._lost.inc()
            logger().warning("failed_call_lost", error=str(error))


def _cut(text: str | None, chars: int) -> str | None:
    return None if text is None else text[:chars]

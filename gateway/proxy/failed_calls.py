"""Model calls that were answered with an error: a record of each, beside the log's own promises.

Best effort, on purpose. An error is answered at once, and what is told of it never waits, is never spooled and never fails a call: while
Kafka is away, or too many are on their way, it is counted (`clawstream_gateway_failed_calls`, `lost`) and dropped. A call that sampled
something has steps instead, with the promises of `journal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from ulid import ULID

from gateway.asgi.error_replies import http_error_of
from gateway.attribution.resolver import Caller, Door
from gateway.attribution.sessions import Origin
from gateway.capture.steps import Call
from gateway.clock import Clock
from gateway.durability.log import Bus, Message
from gateway.errors import GatewayError
from gateway.metrics import Metrics
from gateway.redaction.shell import Redaction
from runtime.logs import logger
from schemas.codec.single_object import Codec
from schemas.errors import InvalidId
from schemas.ids import check_run_id
from schemas.records import FailedCall, FailureSource

MAX_ON_THE_WAY = 1000
"""Records that wait for Kafka at once."""
MESSAGE_CHARS = 2000
TYPE_CHARS = 200
READ_BYTES = 64 * 1024
"""Of an engine's error: a longer one is not parsed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong. status: HTTP's."""

    source: FailureSource
    status: int
    error_type: str | None
    message: str


@dataclass(slots=True)
class Attempt:
    """A call from its arrival on, as far as it has come. received_at: microseconds. began: monotonic seconds.

    key, group: trajectory and prompt uid of its path. caller None: its key was not checked yet. call None: its body was not understood yet.
    engine: name of the one that was asked last. model: of a call that makes no step and so never has a `call`.
    """

    protocol: str
    headers: Mapping[str, str]
    received_at: int
    began: float
    key: str | None = None
    group: str | None = None
    caller: Caller | None = None
    call: Call | None = None
    engine: str | None = None
    model: str | None = None


def failure_of(error: GatewayError) -> Failure:
    """The gateway's own error."""
    kind = http_error_of(error)
    return Failure("gateway", kind.status, kind.type, error.message)


def engine_failure(status: int, body: bytes) -> Failure:
    """An engine's own error reply, whatever it is."""
    said = _read(body)
    error = said.get("error", said.get("detail", said))
    if isinstance(error, dict):
        kind, message = error.get("type"), error.get("message")
        text = message if isinstance(message, str) else _text(body)
        return Failure("engine", status, kind if isinstance(kind, str) else None, text)
    return Failure("engine", status, None, error if isinstance(error, str) else _text(body))


def _read(body: bytes) -> Mapping[str, Any]:
    try:
        said = orjson.loads(body) if len(body) <= READ_BYTES else None
    except orjson.JSONDecodeError:
        said = None
    return said if isinstance(said, dict) else {}


def _text(body: bytes) -> str:
    return body[: 4 * MESSAGE_CHARS].decode(errors="replace")


class FailedCalls:
    """Tells the log. redaction None: everything is told as it is."""

    def __init__(
        self, topic: str, gateway_id: str, codec: Codec, bus: Bus, door: Door,
        redaction: Redaction | None, clock: Clock,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        self._topic, self._gateway_id, self._codec, self._bus = topic, gateway_id, codec, bus
        self._door, self._redaction, self._clock = door, redaction, clock
        self._recorded, self._lost = (
            metrics.failed_calls.labels(fate) for fate in ("recorded", "lost")
        )
        self._on_the_way = 0

    def attempt(
        self, protocol: str, headers: Mapping[str, str], key: str | None, group: str | None
    ) -> Attempt:
        """A call that has just come. headers: names in lower case."""
        return Attempt(protocol, headers, self._clock.micros(), self._clock.monotonic(), key, group)

    def record(self, attempt: Attempt, failure: Failure) -> None:
        """Tell the log, if the call's key was checked. It never waits; call it behind the reply where you send that."""
        if attempt.caller is None:
            return
        if not self._bus.reachable or self._on_the_way >= MAX_ON_THE_WAY:
            self._lost.inc()
            return
        origin = (
            attempt.call.origin
            if attempt.call is not None
            else self._origin(attempt, attempt.caller)
        )
        try:
            run = (
                origin.run_id
                if origin is not None
                else check_run_id(self._door.run_of(attempt.caller, attempt.headers))
            )
        except InvalidId:  # no run that there could be
            self._lost.inc()
            return
        self._send(self._record(attempt, failure, run, origin))

    def _origin(self, attempt: Attempt, caller: Caller) -> Origin | None:
        """Where the call belongs, if that stands outside of its body."""
        try:
            return self._door.origin(caller, attempt.headers, attempt.key, attempt.group)
        except GatewayError:
            return None

    def _record(
        self, attempt: Attempt, failure: Failure, run: str, origin: Origin | None
    ) -> FailedCall:
        call = attempt.call
        model = call.request.model if call is not None else attempt.model
        record = FailedCall(
            event_id=call.call_id if call is not None else str(ULID()),
            run_id=run,
            trajectory_key=origin.trajectory_key if origin is not None else None,
            group_id=origin.group_id if origin is not None else None,
            channel=origin.channel if origin is not None else None,
            protocol=attempt.protocol,
            model=_cut(model, TYPE_CHARS),
            streamed=call is not None and call.request.stream,
            source=failure.source,
            status=failure.status,
            error_type=_cut(failure.error_type, TYPE_CHARS),
            message=failure.message[: 4 * MESSAGE_CHARS],
            engine=attempt.engine,
            idempotency_key=call.idempotency_key if call is not None else None,
            retry_count=call.retry_count if call is not None else None,
            user_agent=attempt.headers.get("user-agent"),
            gateway_id=self._gateway_id,
            received_at=attempt.received_at,
            duration_ms=(self._clock.monotonic() - attempt.began) * 1000,
        )
        if self._redaction is not None:
            record = self._redaction.redacted_at_once(
                record
            )  # before it is cut: half a secret is found by no rule
        return replace(record, message=record.message[:MESSAGE_CHARS])

    def _send(self, record: FailedCall) -> None:
        key = record.trajectory_key if record.trajectory_key is not None else record.event_id
        self._on_the_way += 1
        self._bus.send([Message(self._topic, key.encode(), self._codec.encode(record))], self._sent)

    def _sent(self, error: Exception | None) -> None:
        self._on_the_way -= 1
        if error is None:
            self._recorded.inc()
        else:
            self._lost.inc()
            logger().warning("failed_call_lost", error=str(error))


def _cut(text: str | None, chars: int) -> str | None:
    return None if text is None else text[:chars]

"""The only path from an event to Kafka: redact the event, encode it, make it durable."""

from __future__ import annotations

from collections.abc import Sequence

from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.log import Message
from clawstream.gateway.durability.pending_write import DeliveryStatus
from clawstream.gateway.redaction.redactor import Redaction
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Curation, Reward, SessionEvent, Step
from clawstream.schemas.topics import Topics

Event = Step | SessionEvent | Reward | Curation


class RecordWriter:
    """Writes events as records. redaction None: events are written unchanged."""

    def __init__(
        self, topics: Topics, codec: Codec, delivery: DeliveryManager, redaction: Redaction | None
    ) -> None:
        self._codec, self._delivery, self._redaction = codec, delivery, redaction
        self._steps, self._rewards = topics.steps, topics.rewards

    async def record(self, events: Sequence[Event]) -> DeliveryStatus:
        """Write events; durable on return, in this order per key and topic. Raises NotRecorded."""
        if self._redaction is not None:
            events = [await self._redaction.redacted(event) for event in events]
        return await self._delivery.record([self._message(event) for event in events])

    def _message(self, event: Event) -> Message:
        topic = self._steps if isinstance(event, (Step, SessionEvent)) else self._rewards
        return Message(topic, event.trajectory_key.encode(), self._codec.encode(event))

"""Builds session events, rewards and curations, and makes them durable.

An event id is a function of the event's content, so a repeated request adds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from clawstream.gateway.api.bodies import Complete, Curate, GiveReward, Register, json_of
from clawstream.gateway.api.targets import check_one_trajectory
from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.durability.record_writer import Event
from clawstream.gateway.errors import Unprocessable
from clawstream.gateway.protocols.request_fields import dumps
from clawstream.gateway.proxy.services import Services
from clawstream.schemas.ids import is_gateway_assigned, stable_id
from clawstream.schemas.records import Curation, Reward, SessionEvent
from clawstream.schemas.records.rewards import (
    COMPLETION_NAME,
    COMPLETION_SOURCE,
    COMPLETION_VERSION,
)

AT_ONCE = 256
"""Records created before the event loop yields: 10 ms, small beside the wait for Kafka."""


class Recorder:
    """Builds events of a trajectory from the bodies of requests, and writes them to the log."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def opened(self, ref: TrajectoryRef, body: Register) -> SessionEvent:
        """Return the opening of a trajectory.

        An equal opening has the same event id; a different one adds the fields that were absent
        before.
        """
        content = (body.metadata, body.group_size, body.round, ref.channel, ref.group_id)
        digested = dumps(content, "metadata", Unprocessable, sort=True).decode()
        return SessionEvent(
            event_id=stable_id(ref.run_id, ref.trajectory_key, "opened", digested),
            kind="opened",
            group_id=ref.group_id,
            channel=ref.channel,
            group_size=body.group_size,
            round=body.round,
            metadata_json=json_of(body.metadata, "metadata"),
            **self._common(ref),
        )

    def ended(
        self, ref: TrajectoryRef, body: Complete, field: str = "reward", by: str | None = None
    ) -> list[Reward | SessionEvent]:
        """Return the rewards of a completion, and the trajectory's end, which carries them.

        Assemble takes the rewards from the end; the lake's table of rewards has the other records.

        Args:
            ref: The trajectory.
            body: Its end.
            field: Name of a single reward's field in error messages.
            by: Author of the rewards.

        Raises:
            Unprocessable: A reward is outside the limits, or no trajectory is named.
        """
        if body.step_id is None:
            check_one_trajectory(ref.trajectory_key, "step_id")
        if body.reward is not None and body.rewards:
            raise Unprocessable("rewards: a completion has reward or rewards, not both", "rewards")
        named = body.rewards or {}
        values = {COMPLETION_NAME: body.reward} if body.reward is not None else named
        content = [] if body.step_id is None else [body.step_id]
        content += [f"{name}={value!r}" for name, value in sorted(values.items())]
        event = SessionEvent(
            event_id=stable_id(ref.run_id, ref.trajectory_key, body.outcome, *content),
            kind=body.outcome,
            group_id=ref.group_id,
            channel=ref.channel,
            step_id=body.step_id,
            reason=body.reason,
            rewards=values or None,
            **self._common(ref),
        )
        rewards = [
            GiveReward(
                source=COMPLETION_SOURCE,
                name=name,
                function_version=COMPLETION_VERSION,
                value=value,
                trajectory_id=ref.trajectory_key,
                step_id=body.step_id if is_gateway_assigned(ref.trajectory_key) else None,
            )
            for name, value in values.items()
        ]
        return [
            *(self.reward(ref, r, f"rewards.{r.name}" if named else field, by) for r in rewards),
            event,
        ]

    def reward(
        self, ref: TrajectoryRef, body: GiveReward, field: str = "value", by: str | None = None
    ) -> Reward:
        """Return a reward; an equal one has the same event id.

        Where the gateway assigned the key, step_id identifies the trajectory. If trajectory_id is
        then the key, the reward applies to that whole trajectory, not to the step.

        Args:
            ref: Trajectory of the reward.
            body: The reward.
            field: Name of the value's field in error messages.
            by: Author, unless `body` names one.

        Raises:
            Unprocessable: The value is outside the limits, or a field cannot be stored.
        """
        limits = self._services.settings.gateway
        if body.value is not None and not limits.reward_min <= body.value <= limits.reward_max:
            raise Unprocessable(
                f"{field}: {body.value:g} is not in "
                f"[{limits.reward_min:g}, {limits.reward_max:g}], "
                "see gateway.reward_min and gateway.reward_max",
                field,
            )
        trajectory_id = body.trajectory_id if is_gateway_assigned(ref.trajectory_key) else None
        content = (
            ",".join(filter(None, (trajectory_id, body.step_id))),
            body.source, body.name, body.function_version,
            str(body.reward_revision), repr(body.value), body.reason or "",
        )  # fmt: skip
        return Reward(
            event_id=stable_id(ref.run_id, ref.trajectory_key, "reward", *content),
            trajectory_id=trajectory_id,
            step_id=body.step_id,
            source=body.source,
            name=body.name,
            function_version=body.function_version,
            value=body.value,
            reason=body.reason,
            reward_revision=body.reward_revision,
            by=body.by or by,
            detail_json=json_of(body.detail, "detail"),
            **self._common(ref),
        )

    def curation(self, ref: TrajectoryRef, body: Curate, by: str, event_id: str) -> Curation:
        """Return a curation.

        Unlike other events, an equal curation is a new event: the last one counts, even after a
        different one.
        """
        return Curation(
            event_id=event_id,
            trajectory_id=body.trajectory_id if is_gateway_assigned(ref.trajectory_key) else None,
            step_id=body.step_id,
            quality=body.quality,
            trainable=body.trainable,
            tags=body.tags,
            note=body.note,
            takes_back=body.takes_back,
            by=by,
            **self._common(ref),
        )

    def _common(self, ref: TrajectoryRef) -> dict[str, Any]:
        return {
            "run_id": ref.run_id,
            "trajectory_key": ref.trajectory_key,
            "created_at": self._services.clock.micros(),
        }

    async def record(self, events: Sequence[Event]) -> None:
        """Write the events in this order; all are durable on return.

        Ends are written after the rewards are durable, so whoever reads an end finds its reward.

        Raises:
            NotRecorded: Some of the events may be durable.
        """
        if any(isinstance(event, Reward) for event in events):
            await self._write([event for event in events if not _is_end(event)])
            events = [event for event in events if _is_end(event)]
        await self._write(events)

    async def _write(self, events: Sequence[Event]) -> None:
        for at in range(0, len(events), AT_ONCE):
            if at:
                await asyncio.sleep(0)
            await self._services.record_writer.record(events[at : at + AT_ONCE])


def _is_end(event: Event) -> bool:
    return isinstance(event, SessionEvent) and event.kind != "opened"

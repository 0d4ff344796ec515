"""One record of an input: check its type and its ids, and call its handler. Pure."""

from __future__ import annotations

from typing import Any

from clawstream.schemas.ids import check_run_id, check_trajectory_key, key_of_step
from clawstream.schemas.records import Assessment, Curation, Reward, SessionEvent, Step
from clawstream.stream_jobs.assemble.handlers.annotations import (
    on_assessment,
    on_curation,
    on_reward,
)
from clawstream.stream_jobs.assemble.handlers.rejected import InvalidRecord, RejectedRecord
from clawstream.stream_jobs.assemble.handlers.sessions import on_session_event
from clawstream.stream_jobs.assemble.handlers.steps import on_step
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload
from clawstream.stream_jobs.assemble.state.changes import Change
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import STEPS, SourceTopic

TOPIC_NAMES = ("claw.steps", "claw.rewards")


def handle(
    state: PartitionState,
    limits: Limits,
    source: SourceTopic,
    offset: int,
    key: bytes | None,
    event: Any,
) -> tuple[list[Change], CachedPayload | None]:
    """Return the changes of a record, and the payload to cache. Never modifies the state.

    Raises:
        RejectedRecord, InvalidId, ValueError: The record cannot be folded.
    """
    if isinstance(event, RejectedRecord):
        raise event
    if not isinstance(
        event, Step | SessionEvent if source == STEPS else Reward | Curation | Assessment
    ):
        raise InvalidRecord(f"a {type(event).__name__} does not belong on {TOPIC_NAMES[source]}")
    run, name = check_run_id(event.run_id), check_trajectory_key(event.trajectory_key)
    if key != name.encode():
        raise InvalidRecord(f"Kafka key {key!r:.250} is not the trajectory key {name!r}")
    if isinstance(event, Assessment):
        return on_assessment(state, limits, offset, (run, name), event), None
    if event.step_id is not None and key_of_step(event.step_id) != name:
        raise InvalidRecord(f"step id {event.step_id!r:.250} is not of trajectory key {name!r}")
    match event:
        case Step():
            return on_step(state, limits, offset, (run, name), event)
        case SessionEvent():
            return on_session_event(state, limits, offset, (run, name), event)
        case Reward():
            return on_reward(state, limits, offset, (run, name), event), None
        case _:
            return on_curation(state, limits, offset, (run, name), event), None

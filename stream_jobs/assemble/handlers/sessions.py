"""Session events: the opening and the end of a trajectory. Pure."""

from __future__ import annotations

from clawstream.schemas.ids import check_group_id, is_gateway_assigned
from clawstream.schemas.records import SessionEvent
from clawstream.schemas.records.parts import NAME_CHARS
from clawstream.schemas.records.rewards import COMPLETION_MAX, out_of_bounds
from clawstream.stream_jobs.assemble.handlers.rejected import InvalidRecord
from clawstream.stream_jobs.assemble.handlers.targets import end, target_of, wait
from clawstream.stream_jobs.assemble.limits import PAYLOAD_BYTES, Limits
from clawstream.stream_jobs.assemble.matching.token_prefix import hash_of
from clawstream.stream_jobs.assemble.payload.trainability import REASON_CHARS
from clawstream.stream_jobs.assemble.state.changes import Attributed, Change, Opened
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import (
    STEPS,
    Completion,
    PendingTarget,
    RunTrajectory,
)


def on_session_event(
    state: PartitionState, limits: Limits, offset: int, name: RunTrajectory, event: SessionEvent
) -> tuple[list[Change], bytes | None]:
    """Return the changes of a session event, and its metadata. Raises RejectedRecord, InvalidId."""
    if len(event.metadata_json or b"") > PAYLOAD_BYTES:
        raise InvalidRecord(f"metadata has more than {PAYLOAD_BYTES} bytes")
    if is_gateway_assigned(name[1]) and (event.kind == "opened" or event.step_id is None):
        raise InvalidRecord(
            f"{name[1]} was made by the gateway: "
            "only a completion that names a step has a target there"
        )
    if event.kind == "opened":
        return _on_opened(state, offset, name, event)
    return _on_ended(state, limits, offset, name, event), None


def _on_opened(
    state: PartitionState, offset: int, key: RunTrajectory, event: SessionEvent
) -> tuple[list[Change], bytes | None]:
    if key in state.closed:
        return [], None
    now, trajectory = state.time[STEPS], state.opened.get(key)
    given = {
        "group_id": check_group_id(event.group_id) if event.group_id is not None else None,
        "group_size": event.group_size,
        "round": event.round,
        "meta": offset if event.metadata_json is not None else None,
    }
    new = {n: v for n, v in given.items() if v is not None and getattr(trajectory, n, None) is None}
    made: list[Change] = []
    if trajectory is None:
        made.append(Opened(key, now, event.channel or "train", offset))
    if new:
        made.append(Attributed(key, now, **new))  # type: ignore[arg-type]
    return made, event.metadata_json if "meta" in new else None


def _on_ended(
    state: PartitionState, limits: Limits, offset: int, name: RunTrajectory, event: SessionEvent
) -> list[Change]:
    rewards = dict(event.rewards or {})
    if len(rewards) > COMPLETION_MAX or any(len(name) > NAME_CHARS for name in rewards):
        raise InvalidRecord(
            f"an end has at most {COMPLETION_MAX} rewards, with names of at most {NAME_CHARS} "
            "characters"
        )
    if (why := next(filter(None, map(out_of_bounds, rewards.values())), None)) is not None:
        raise InvalidRecord(f"a reward of the end: {why}")
    reason = event.reason[:REASON_CHARS] if event.reason else None
    step_suffix = None
    if event.step_id is not None and is_gateway_assigned(name[1]):
        step_suffix = event.step_id[len(name[1]) + 1 :]
    found = target_of(state, name, step_suffix)
    if found in state.closed:
        return []
    assert event.kind != "opened"
    completion = Completion(event.kind, reason, hash_of(event.event_id.encode()), rewards or None)
    pending = PendingTarget(STEPS, offset, state.time[STEPS], name, step_suffix, completion)
    if pending.awaited in state.waiting_for:
        return []
    if found is None:
        return wait(state, limits, pending)
    return end(state, found, completion)

"""Targets of rewards, marks, assessments and completions: lookup, waiting, and its end. Pure."""

from __future__ import annotations

from clawstream.schemas.ids import is_gateway_assigned
from clawstream.schemas.records.rewards import COMPLETION_SOURCE, COMPLETION_VERSION
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.state.annotations import AT_END, Annotation, CurrentReward
from clawstream.stream_jobs.assemble.state.changes import (
    Annotated,
    Change,
    Closed,
    DeadLettered,
    TargetAwaited,
    WaitEnded,
)
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.steps import call_suffix
from clawstream.stream_jobs.assemble.state.trajectories import (
    REWARDS,
    STEPS,
    Completion,
    DeadLetterDecision,
    PendingTarget,
    RunTrajectory,
    SourceTopic,
)


def target_of(
    state: PartitionState, key: RunTrajectory, step_suffix: str | None
) -> RunTrajectory | None:
    """Return the trajectory of a key; None if unknown. For a gateway-assigned key, `step_suffix`
    selects the trajectory.
    """
    if not is_gateway_assigned(key[1]):
        return key if key in state.opened or key in state.closed else None
    index = state.session_indexes.get(key)
    if index is None or step_suffix is None:
        return None
    trajectory = index.calls.get(call_suffix(step_suffix))
    return (key[0], trajectory) if trajectory is not None else None


def appeared_at(
    state: PartitionState, limits: Limits, key: RunTrajectory, step_suffix: str | None, at: int
) -> int | None:
    """Return when the target appeared on `claw.steps`, ms; None if unknown at time `at` of
    `claw.rewards`.
    """
    found = target_of(state, key, step_suffix)
    if found is None:
        return None
    trajectory = state.opened.get(found)
    if trajectory is not None:
        if step_suffix is None:
            return trajectory.opened_at
        position = trajectory.steps.by_suffix.get(step_suffix)
        return trajectory.steps[position].at if position is not None else None
    closed = state.closed[found]
    if state.silences.elapsed(closed.closed_at, at) > limits.closed_horizon:
        return None
    return closed.opened_at if step_suffix is None else closed.step_times.get(step_suffix)


def annotate(
    state: PartitionState, offset: int, key: RunTrajectory, annotation: Annotation
) -> list[Change]:
    """Return the changes of an annotation with a known target.

    Returns nothing if it changes nothing, and a dead letter if the trajectory has too many.
    offset: on `claw.rewards`.
    """
    annotations = state.annotations(key)
    if not annotations.accepts(annotation):
        return []
    if (full := annotations.limit_reached(annotation)) is None:
        return [Annotated(key, annotation)]
    detail = f"trajectory {_describe(key, None)} has {full} already, and keeps no more"
    return [dead_letter(REWARDS, offset, "too_many_rewards", detail)]


def annotate_or_wait(
    state: PartitionState,
    limits: Limits,
    offset: int,
    key: RunTrajectory,
    step_suffix: str | None,
    annotation: Annotation,
) -> list[Change]:
    """Annotate a known target, wait for a target that may still arrive, or dead-letter. key,
    step_suffix: as in `target_of`.
    """
    at, elapsed = state.time[REWARDS], state.silences.elapsed
    since = appeared_at(state, limits, key, step_suffix, at)
    if since is not None and elapsed(at, since) <= limits.orphan_after:
        return annotate(state, offset, target_of(state, key, step_suffix) or key, annotation)
    if since is None and elapsed(at, state.time[STEPS]) <= limits.orphan_after:
        return wait(state, limits, PendingTarget(REWARDS, offset, at, key, step_suffix, annotation))
    detail = f"no {'step' if step_suffix else 'trajectory'} {_describe(key, step_suffix)} in time"
    return [dead_letter(REWARDS, offset, "unknown_target", detail)]


def wait(state: PartitionState, limits: Limits, pending: PendingTarget) -> list[Change]:
    """Wait for a target; ends the oldest waits if there are too many."""
    side, changes = state.waiting[pending.source], list[Change]()
    closing = set[RunTrajectory]()  # two ends may be of one trajectory, which ends once
    excess = len(side) + 1 - limits.waiting_max
    size = state.waiting_bytes[pending.source] + pending.size - limits.waiting_bytes_max
    why = f"more than {limits.waiting_max} records or {limits.waiting_bytes_max} bytes wait"
    for oldest in side.values():
        if excess <= 0 and size <= 0:
            break
        ended = end_wait(state, oldest, f"{why} in this partition")
        changes += [
            c for c in ended if not isinstance(c, Annotated | Closed) or c.key not in closing
        ]
        closing |= {c.key for c in ended if isinstance(c, Closed)}
        excess, size = excess - 1, size - oldest.size
    return [*changes, TargetAwaited(pending)]


def end_wait(state: PartitionState, pending: PendingTarget, why: str) -> list[Change]:
    """End a wait in vain: a completion closes the steps that have arrived; anything else becomes a
    dead letter.
    """
    changes: list[Change] = [WaitEnded(pending.source, pending.offset)]
    found = target_of(state, pending.key, pending.step_suffix)
    if isinstance(pending.what, Completion) and found is not None:
        return [*changes, *end(state, found, pending.what)] if found in state.opened else changes
    detail = (
        f"no {'step' if pending.step_suffix else 'trajectory'} "
        f"{_describe(pending.key, pending.step_suffix)}: {why}"
    )
    return [*changes, dead_letter(pending.source, pending.offset, "unknown_target", detail)]


def end(state: PartitionState, key: RunTrajectory, how: Completion) -> list[Change]:
    """Return the changes that end an open trajectory: its own rewards, and then the closing.

    The limit on rewards does not apply: there is one end, and its few rewards must count.
    """
    changes = list[Change]()
    for name, value in (how.rewards or {}).items():
        own = CurrentReward(
            source=COMPLETION_SOURCE,
            name=name,
            version=COMPLETION_VERSION,
            step_suffix=None,
            value=value,
            reason=None,
            revision=0,
            offset=AT_END,
        )
        if state.annotations(key).accepts(own):
            changes.append(Annotated(key, own))
    return [*changes, Closed(key, how.outcome, how.reason, state.time[STEPS])]


def dead_letter(source: SourceTopic, offset: int, reason: str, detail: str) -> Change:
    """Return the change that makes a record a dead letter."""
    return DeadLettered(DeadLetterDecision(source, offset, reason, detail))


def _describe(key: RunTrajectory, step_suffix: str | None) -> str:
    return f"{key[1]}~{step_suffix} of run {key[0]}" if step_suffix else f"{key[1]} of run {key[0]}"

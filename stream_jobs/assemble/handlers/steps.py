"""Steps: the trajectory that a step belongs to, and the changes that it causes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from clawstream.schemas.conversation import RecordedRequest
from clawstream.schemas.ids import (
    check_group_id,
    is_anonymous_session,
    is_gateway_assigned,
    parse_traceparent,
    session_trajectory_id,
)
from clawstream.schemas.records import Step
from clawstream.schemas.records.parts import NAME_CHARS, TAGS_MAX
from clawstream.stream_jobs.assemble.handlers.rejected import InvalidRecord
from clawstream.stream_jobs.assemble.limits import PAYLOAD_BYTES, Limits
from clawstream.stream_jobs.assemble.matching.anonymous_sessions import (
    EXPLICIT,
    Placement,
    SessionIndex,
    place_in_agent_session,
    place_step,
)
from clawstream.stream_jobs.assemble.matching.conversation import turn_hash, turns_of
from clawstream.stream_jobs.assemble.matching.retries import (
    Retry,
    idempotency_hash,
    request_hash,
    retry_of,
    undo_retry,
)
from clawstream.stream_jobs.assemble.matching.token_prefix import hash_of, match_prefix
from clawstream.stream_jobs.assemble.payload.cache import StepPayload, payload_of
from clawstream.stream_jobs.assemble.payload.new_messages import new_messages
from clawstream.stream_jobs.assemble.payload.segment_tree import TOKEN_BYTES
from clawstream.stream_jobs.assemble.payload.trainability import trainability
from clawstream.stream_jobs.assemble.state import changes
from clawstream.stream_jobs.assemble.state.changes import Change
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.steps import OpenStep, OpenSteps, call_suffix
from clawstream.stream_jobs.assemble.state.trajectories import (
    STEPS,
    OpenTrajectory,
    RunTrajectory,
    StepMarkDecision,
)


def on_step(
    state: PartitionState, limits: Limits, offset: int, name: RunTrajectory, step: Step
) -> tuple[list[Change], StepPayload | None]:
    """Return the changes of a step, and its payload.

    Raises:
        RejectedRecord, InvalidId, ValueError: The step cannot be folded.
    """
    step_suffix = step.step_id[len(name[1]) + 1 :]
    _check_sizes(step, step_suffix)
    request = RecordedRequest(step.request_json)
    key, placement = _place(state, name, step_suffix, step, request)
    if key in state.closed:
        return _on_late_step(state, offset, key, step.step_id, step_suffix), None
    trajectory = state.opened.get(key)
    steps = trajectory.steps if trajectory else OpenSteps()
    if step_suffix in steps.by_suffix:
        return [], None
    now = state.time[STEPS]
    trained = trainability(step, limits.train_truncated)
    messages = new_messages(request, limits.new_messages_bytes)
    matched = match_prefix(steps, step)
    new = OpenStep(
        offset=offset,
        at=now,
        step_suffix=step_suffix,
        prompt=len(step.prompt_token_ids or b"") // TOKEN_BYTES,
        response=len(step.response_token_ids or b"") // TOKEN_BYTES,
        base=matched.base,
        end_hash=matched.end_hash,
        status=step.status,
        reason=trained.reason,
        oldest=trained.oldest,
        newest=trained.newest,
        reply=len(step.response_json) + len(messages or b"") >> 10,
        prompt_hash=request_hash(request) if matched.prompt_hash is None else matched.prompt_hash,
        idempotency_hash=idempotency_hash(step),
        reply_hash=placement.reply_hash,
        after=placement.after if placement.after != matched.base else None,
        tags=[t.name for t in step.tags] or None,
        last_turn_hash=_last_turn_hash(request) if matched.diverges else None,
        messages_hash=placement.messages_hash,
        call_id_hash=placement.call_id_hash,
        exchange_hash=placement.exchange_hash,
        words=placement.words,
    )
    made: list[Change] = []
    if trajectory is None:
        made.append(changes.Opened(key, now, step.channel or "train", offset))
    made += _attributed(key, now, trajectory, step)
    made.append(changes.StepAdded(trajectory.open_seq if trajectory else offset, new))
    if (retry := _retry(steps, new, step, request)) is not None:
        made.append(changes.Retried(key, retry.replaced, retry.counted))
    if (full := _full(limits, steps, new)) is not None:
        made.append(changes.Closed(key, "timed_out", full, now))
    return made, payload_of(step, trained, steps.start_of(new), messages)


def _attributed(
    key: RunTrajectory, now: int, trajectory: OpenTrajectory | None, step: Step
) -> Iterator[Change]:
    """Yield what a step is the first of its trajectory to name. Raises InvalidId."""
    group_id = context = None
    if step.group_id is not None and (trajectory is None or trajectory.group_id is None):
        group_id = check_group_id(step.group_id)
    if trajectory is None or trajectory.traceparent is None:
        context = parse_traceparent(step.traceparent)
    if group_id is not None or context is not None:
        traceparent = context.header if context is not None else None
        yield changes.Attributed(key, now, group_id=group_id, traceparent=traceparent)


def _check_sizes(step: Step, step_suffix: str) -> None:
    """Reject a step that would make an output record too large. Raises InvalidRecord."""
    names = [step_suffix, step.finish_reason, step.version_first, step.version_last]
    names += [s.version for s in step.versions] + [t.name for t in step.tags]
    names.append(step.tokenizer_fingerprint)
    if max([len(name) for name in names if name is not None]) > NAME_CHARS:
        raise InvalidRecord(
            f"step id, finish reason, versions, tags and tokenizer have at most {NAME_CHARS} "
            "characters"
        )
    if len(step.tags) > TAGS_MAX:
        raise InvalidRecord(f"a step has at most {TAGS_MAX} tags")
    packed = (
        step.prompt_token_ids,
        step.response_token_ids,
        step.response_logprobs,
        step.response_json,
    )
    tags = sum([len(t.evidence) for t in step.tags])
    if sum([len(part) for part in packed if part is not None]) + 4 * tags > PAYLOAD_BYTES:
        raise InvalidRecord(f"tokens, reply and tags have more than {PAYLOAD_BYTES} bytes")


def _place(
    state: PartitionState,
    name: RunTrajectory,
    step_suffix: str,
    step: Step,
    request: RecordedRequest,
) -> tuple[RunTrajectory, Placement]:
    """Return the trajectory of a step, and how it was found."""
    if not is_gateway_assigned(name[1]):
        return name, EXPLICIT
    run, session = name
    index = state.session_indexes.get(name) or SessionIndex()
    if is_anonymous_session(session):
        placement = place_step(
            index, lambda t: state.opened[run, t].steps, step_suffix, step, request
        )
    else:
        placement = place_in_agent_session(index, step_suffix)
    new = session_trajectory_id(session, call_suffix(step_suffix))
    return (run, placement.trajectory or new), placement


def _on_late_step(
    state: PartitionState, offset: int, key: RunTrajectory, step_id: str, step_suffix: str
) -> list[Change]:
    closed, hashed = state.closed[key], hash_of(step_suffix.encode())
    if hashed in closed.late or step_suffix in closed.step_times:
        return []
    evidence = f"closed as {closed.outcome} at {closed.closed_at}"
    mark = StepMarkDecision(key, step_id, "late", evidence, offset)
    return [changes.StepMarked(mark, hashed)]


def _last_turn_hash(request: RecordedRequest) -> int | None:
    """See `OpenStep`. Called only when the prompt diverges: it may parse the request."""
    turns = turns_of(request)
    return turn_hash(turns[-1]) if turns else None


def _retry(steps: OpenSteps, new: OpenStep, step: Step, request: RecordedRequest) -> Retry | None:
    """Return the retry that the next step causes: its own, or one that it undoes."""
    if (retry := retry_of(steps, new, step, request)) is not None:
        return retry
    undone = (undo_retry(steps, at) for at in (new.base, new.after) if at is not None)
    return next((retry for retry in undone if retry is not None), None)


def _full(limits: Limits, steps: OpenSteps, new: OpenStep) -> str | None:
    """Return why a trajectory closes with its next step; None if there is room for more."""
    if len(steps) + 1 >= limits.steps_max:
        return f"full: {len(steps) + 1} steps"
    size = steps.size + steps.size_of(new)
    return f"full: {size} bytes of payload" if size >= limits.payload_max else None

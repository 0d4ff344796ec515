"""The output records of a closed trajectory: its payload in parts, and its candidate. Pure.

Bytes depend only on the decision (the steps at closing, the outcome, the annotations) and on the
payload; never on a clock, on the order of arrival across topics, or on a location.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import key_of_trajectory, parse_version, stable_id
from clawstream.schemas.records import (
    Candidate,
    CandidateStep,
    RewardValue,
    Segment,
    StepMark,
    Trajectory,
    TrajectoryStep,
)
from clawstream.schemas.topics import MAX_RECORD_BYTES
from clawstream.stream_jobs.assemble.matching.conversation import reply_of, turn_hash
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload, StepPayload
from clawstream.stream_jobs.assemble.payload.segment_tree import SampledTokens, build
from clawstream.stream_jobs.assemble.state.annotations import CurationState
from clawstream.stream_jobs.assemble.state.steps import STEP_BYTES, OpenStep
from clawstream.stream_jobs.assemble.state.trajectories import (
    ClosedTrajectory,
    OpenTrajectory,
    RunTrajectory,
    StepMarkDecision,
)

T = TypeVar("T")
_UNMARKED = CurationState()


@dataclass(frozen=True, slots=True)
class Assembled:
    """A closed trajectory as records. order: log position of the step at each index; empty if
    unchanged. prompt_tokens: environment tokens, each counted once.
    """

    parts: tuple[Trajectory, ...]
    order: tuple[int, ...]
    prompt_tokens: int


def starts_of(trajectory: OpenTrajectory) -> dict[int, int]:
    """Return the `claw.steps` offsets whose payload the trajectory needs, each with the `start` of
    `payload_of`.
    """
    starts = {s.offset: trajectory.steps.start_of(s) for s in trajectory.steps}
    return starts if trajectory.meta is None else {**starts, trajectory.meta: 0}


def slices(
    items: Iterable[T], size_of: Callable[[T], int], limit: int, used: int = 0
) -> list[list[T]]:
    """Split items, in order, into runs of at most `limit` bytes; a larger item is alone. used:
    bytes of the first run that are taken.
    """
    runs: list[list[T]] = [[]]
    for item in items:
        size = size_of(item)
        if used + size > limit and (runs[-1] or used):
            runs.append([])
            used = 0
        runs[-1].append(item)
        used += size
    return runs


def assembled(
    key: RunTrajectory,
    trajectory: OpenTrajectory,
    closed: ClosedTrajectory,
    payload: Mapping[int, CachedPayload],
) -> Assembled:
    """Create the records of a trajectory. payload: by offset, all of `starts_of`; ignored when the
    outcome is `lost`.
    """
    payloads = (
        [None] * len(trajectory.steps)
        if closed.outcome == "lost"
        else _payloads(trajectory, payload)
    )
    name = key_of_trajectory(key[1])
    tree = build(
        [_sampled(entry, stored) for entry, stored in zip(trajectory.steps, payloads, strict=True)],
        lambda step, earlier: _repeats(trajectory.steps[step], payloads[earlier]),
    )
    steps: list[TrajectoryStep | None] = [None] * len(trajectory.steps)
    for entry, node, stored in zip(trajectory.steps, tree.nodes, payloads, strict=True):
        steps[node.index] = TrajectoryStep(
            step_id=f"{name}~{entry.step_suffix}",
            index=node.index,
            parent=node.parent,
            segment=node.segment,
            status=entry.status,
            finish_reason=stored.finish_reason if stored else None,
            drift=node.drift,
            prompt_tokens=entry.prompt,
            response_tokens=entry.response,
            response_json=stored.response_json if stored else b"",
            oldest_version=entry.oldest,
            newest_version=entry.newest,
            trainable=entry.reason is None and stored is not None,
            untrainable_reason=entry.reason if stored else "payload lost to retention",
            tags=stored.tags if stored else (),
            marks=("retried",) if entry.retried is not None else (),
            offset=entry.offset,
            logprobs_temperature=stored.logprobs_temperature if stored else None,
            tokenizer_fingerprint=stored.tokenizer_fingerprint if stored else None,
            new_messages_json=stored.new_messages_json if stored else None,
            images=stored.images if stored else (),
        )
    done = tuple(s for s in steps if s is not None)
    metadata = (
        payload.get(trajectory.meta)
        if trajectory.meta is not None and closed.outcome != "lost"
        else None
    )
    whole = Trajectory(
        run_id=key[0],
        trajectory_key=name,
        trajectory_id=key[1],
        group_id=trajectory.group_id or key[1],
        group_size=trajectory.group_size,
        round=trajectory.round,
        channel=trajectory.channel,
        outcome=closed.outcome,
        reason=closed.reason,
        opened_at=trajectory.opened_at,
        closed_at=closed.closed_at,
        metadata_json=metadata if isinstance(metadata, bytes) else None,
        part=0,
        parts=1,
        segments=tree.segments,
        steps=done,
        traceparent=closed.traceparent,
    )
    order = tuple(sorted(range(len(tree.nodes)), key=lambda at: tree.nodes[at].index))
    straight = order == tuple(range(len(order)))
    return Assembled(tuple(in_parts(whole)), () if straight else order, tree.environment_tokens)


def in_parts(whole: Trajectory, limit: int = MAX_RECORD_BYTES) -> Iterator[Trajectory]:
    """Split a trajectory into records of about `limit` bytes: segments, then steps. The first part
    has the metadata.
    """
    metadata = len(whole.metadata_json or b"")
    segments = slices(whole.segments, _segment_size, limit, metadata)
    used = sum(map(_segment_size, segments[-1])) + (metadata if len(segments) == 1 else 0)
    steps = slices(whole.steps, _step_size, limit, used)
    count = len(segments) + len(steps) - 1
    for part in range(count):
        at = part - len(segments) + 1
        yield replace(
            whole,
            part=part,
            parts=count,
            metadata_json=whole.metadata_json if part == 0 else None,
            segments=tuple(segments[part]) if at <= 0 else (),
            steps=tuple(steps[at]) if at >= 0 else (),
        )


def candidate(
    key: RunTrajectory, closed: ClosedTrajectory, codec: Codec
) -> tuple[Candidate, bytes]:
    """Create the candidate of the current revision, and encode it in at most MAX_RECORD_BYTES."""
    record = _whole_candidate(key, closed)
    value = codec.encode(record)
    if len(value) > MAX_RECORD_BYTES:
        record = _without_steps(record, len(value))
        value = codec.encode(record)
    return record, value


def _whole_candidate(key: RunTrajectory, closed: ClosedTrajectory) -> Candidate:
    annotations = closed.annotations
    whole, assessed = annotations.marks.get("", _UNMARKED), annotations.assessed
    name = key_of_trajectory(key[1])
    steps, synced = list[CandidateStep](), set[int]()
    scores = (
        assessed.steps
        if assessed is not None and len(assessed.steps) == len(closed.steps)
        else None
    )
    for index, s in enumerate(closed.steps):
        marks = annotations.marks.get(s.step_suffix, _UNMARKED)
        reason = s.reason or ("curation" if marks.trainable is False else None)
        score = scores[index] if scores is not None else None
        found = _sync_indexes(s.oldest, s.newest) if reason is None else ()
        synced.update(found)
        steps.append(
            CandidateStep(
                step_id=f"{name}~{s.step_suffix}",
                index=index,
                response_tokens=s.response,
                trainable=reason is None,
                reason=reason,
                quality=score if marks.quality is None else marks.quality,
                tags=(*(s.tags or ()), *[t for t in marks.tags or () if t not in (s.tags or ())]),
                assessed_quality=score,
                oldest_sync_index=min(found, default=None),
            )
        )
    trained = [s for s, c in zip(closed.steps, steps, strict=True) if c.trainable]
    quality = assessed.quality if assessed is not None else None
    reason = _why_not(closed, whole, bool(trained))
    return Candidate(
        run_id=key[0],
        channel=closed.channel,
        trajectory_key=name,
        trajectory_id=key[1],
        group_id=closed.group_id or key[1],
        group_size=closed.group_size,
        round=closed.round,
        revision=closed.revision,
        outcome=closed.outcome,
        opened_at=closed.opened_at,
        closed_at=closed.closed_at,
        rewards=_rewards(key, closed),
        steps=tuple(steps),
        prompt_tokens=closed.prompt_tokens,
        trainable_tokens=sum(s.response for s in trained),
        oldest_sync_index=min(synced, default=None),
        newest_sync_index=max(synced, default=None),
        trainable=reason is None,
        reason=reason,
        quality=quality if whole.quality is None else whole.quality,
        tags=tuple(whole.tags or ()),
        assessed_quality=quality,
        assessment_revision=assessed.revision if assessed is not None else None,
        traceparent=closed.traceparent,
    )


def payload_headers(key: RunTrajectory, closed: ClosedTrajectory) -> dict[str, bytes]:
    """Create the headers of a candidate's record: the location of the payload."""
    assert closed.place is not None, f"{key}: a candidate before its trajectory"
    names = ("topic_id", "partition", "first_offset", "last_offset")
    return {name: str(part).encode() for name, part in zip(names, closed.place, strict=True)}


def step_mark(mark: StepMarkDecision) -> StepMark:
    """Create the record of a mark on a late step."""
    run, key = mark.key
    return StepMark(
        event_id=stable_id("step_mark", run, mark.step_id, mark.kind),
        run_id=run,
        trajectory_key=key_of_trajectory(key),
        trajectory_id=key,
        step_id=mark.step_id,
        mark=mark.kind,
        evidence=mark.evidence,
        offset=mark.offset,
    )


def _sync_indexes(*versions: str | None) -> list[int]:
    """Return the sync indexes of the labels that are versions of a run."""
    return [
        found.sync_index
        for v in versions
        if v is not None and (found := parse_version(v)) is not None
    ]


def _without_steps(record: Candidate, size: int) -> Candidate:
    """Reduce a candidate of `size` bytes to trajectory-level fields, and make it untrainable: its
    steps cannot be listed.
    """
    reason = (
        f"candidate of {size} bytes exceeds {MAX_RECORD_BYTES}: "
        f"{len(record.steps)} steps, {len(record.rewards)} rewards"
    )
    return replace(
        record,
        steps=(),
        rewards=tuple(r for r in record.rewards if r.step_id is None)[:50],
        tags=record.tags[:50],
        trainable=False,
        reason=reason,
        trainable_tokens=0,
    )


def _why_not(closed: ClosedTrajectory, marks: CurationState, some_step: bool) -> str | None:
    if closed.outcome == "lost":
        return closed.reason or "payload lost"
    if marks.trainable is False:
        return "curation"
    return None if some_step else "no trainable step"


def _rewards(key: RunTrajectory, closed: ClosedTrajectory) -> tuple[RewardValue, ...]:
    values = (
        RewardValue(
            source=r.source,
            name=r.name,
            function_version=r.version,
            value=r.value,
            reason=r.reason,
            reward_revision=r.revision,
            step_id=f"{key_of_trajectory(key[1])}~{r.step_suffix}"
            if r.step_suffix is not None
            else None,
        )
        for r in closed.annotations.rewards
    )
    return tuple(sorted(values, key=lambda r: (r.source, r.name, r.step_id or "")))


def _payloads(
    trajectory: OpenTrajectory, payload: Mapping[int, CachedPayload]
) -> list[StepPayload | None]:
    payloads: list[StepPayload | None] = []
    for entry in trajectory.steps:
        stored = payload[entry.offset]
        assert isinstance(stored, StepPayload), f"offset {entry.offset} is no step"
        payloads.append(stored)
    return payloads


def _sampled(entry: OpenStep, stored: StepPayload | None) -> SampledTokens | None:
    """Return the tokens of a step. Prompt tokens that its payload omits are those of its base."""
    if stored is None or not stored.tokens:
        return None
    base = entry.base if stored.start else None
    # A replaced step is in the lake, but is no branch of the tree.
    return SampledTokens(
        stored.prompt,
        stored.response,
        stored.logprobs,
        stored.versions,
        base,
        counts=entry.retried is None,
    )


def _repeats(step: OpenStep, earlier: StepPayload | None) -> bool:
    """Return whether the last model turn in a step's request is the reply of an earlier step."""
    if step.last_turn_hash is None or earlier is None:
        return False
    reply = reply_of(earlier.response_json)
    return reply is not None and turn_hash(reply) == step.last_turn_hash


def _segment_size(s: Segment) -> int:
    versions = sum([4 * len(v.version) + 20 for v in s.versions]) if s.versions else 0
    return len(s.token_ids) + len(s.logprobs or b"") + versions + STEP_BYTES


def _step_size(s: TrajectoryStep) -> int:
    tags = sum([len(t.name) + len(t.evidence) + 8 for t in s.tags]) if s.tags else 0
    names = len(s.step_id) + len(s.finish_reason or "") + len(s.tokenizer_fingerprint or "") + tags
    images = sum([len(digest) + 4 for digest in s.images])
    payload = len(s.response_json) + len(s.new_messages_json or b"")
    # UTF-8 has at most 4 bytes a character
    return payload + 4 * names + images + 2 * STEP_BYTES

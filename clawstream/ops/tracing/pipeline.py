"""Spans of trajectories, decisions, batches, weight versions and their loading. Pure.

A trajectory's spans are in the trace of its client. A batch and a version belong to many
trajectories, so each has a trace of its own, with links in both directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clawstream.ops.tracing.spans import (
    EVENTS_MAX,
    LINKS_MAX,
    Parent,
    RecordPlace,
    Span,
    SpanEvent,
    SpanId,
    attributes,
    parent_of_trajectory,
    present,
    trajectory_span_id,
)
from clawstream.schemas.ids import key_of_trajectory, span_id_of, trace_id_of
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Candidate,
    ReadyBatch,
    Refused,
    RewardValue,
    WeightVersion,
    WorkerStatus,
)

REVISIONS_MAX = 100
"""Revisions of a trajectory that have a span: each later reward or mark makes one."""
WORK_SECONDS = ("read_seconds", "train_seconds", "save_seconds")
"""Metrics of a version that add up to the time of making it."""


def candidate_spans(c: Candidate, at: RecordPlace, own_traces: bool) -> Iterator[Span]:
    """Yield the span of a trajectory when it closes, and one for each revision, with its rewards.

    A record that assemble sends again after a crash has a span of its own for its revision.
    """
    context = parent_of_trajectory(
        c.traceparent, c.run_id, c.trajectory_key, c.trajectory_id, own_traces
    )
    if context is None or c.revision > REVISIONS_MAX:
        return
    opened_us, closed_us = c.opened_at * 1000, c.closed_at * 1000
    trajectory = SpanId(context.trace_id, trajectory_span_id(c.run_id, c.trajectory_id))
    named = attributes(
        run_id=c.run_id, trajectory_id=c.trajectory_id, group_id=c.group_id, round=c.round
    )
    if c.revision == 0:
        yield Span(
            id=trajectory,
            parent_id=context.parent_id,
            is_remote=context.is_remote,
            part="assemble",
            name="trajectory",
            start_us=opened_us,
            end_us=max(opened_us, closed_us),
            attributes=named
            | attributes(
                channel=c.channel,
                outcome=c.outcome,
                steps=len(c.steps),
                prompt_tokens=c.prompt_tokens,
                response_tokens=sum(s.response_tokens for s in c.steps),
            ),
        )
    place = (at.topic_id, str(at.partition), str(at.offset))
    revision = span_id_of("revision", c.run_id, c.trajectory_id, str(c.revision), *place)
    end_us = max(closed_us, at.at_us)
    yield Span(
        id=SpanId(context.trace_id, revision),
        parent_id=trajectory.span_id,
        part="assemble",
        name="assemble",
        start_us=closed_us,
        end_us=end_us,
        attributes=named
        | attributes(
            revision=c.revision,
            trainable=c.trainable,
            trainable_tokens=c.trainable_tokens,
            reason=c.reason,
            quality=c.quality,
            oldest_sync_index=c.oldest_sync_index,
            tags=c.tags,
        ),
        events=tuple(_reward(r, end_us) for r in c.rewards[:EVENTS_MAX]),
    )


def _reward(reward: RewardValue, at_us: int) -> SpanEvent:
    found = {
        "gen_ai.evaluation.name": f"{reward.source}/{reward.name}",
        "gen_ai.evaluation.score.value": reward.value,
        "gen_ai.evaluation.explanation": reward.reason,
        "clawstream.step_id": reward.step_id,
        "clawstream.function_version": reward.function_version,
    }
    return SpanEvent(name="gen_ai.evaluation.result", at_us=at_us, attributes=present(found))


def batch_span_id(topic_id: str, batch_seq: int) -> SpanId:
    """Return the span of a batch. topic_id: Of the ready batches."""
    named = (topic_id, str(batch_seq))
    return SpanId(trace_id_of("batch", *named), span_id_of("batch", *named))


def _admit_span_id(topic_id: str, batch_seq: int, trajectory_id: str) -> str:
    return span_id_of("admit", topic_id, str(batch_seq), trajectory_id)


def batch_spans(batch: ReadyBatch, at: RecordPlace, own_traces: bool) -> Iterator[Span]:
    """Yield the span of a batch, linked to its trajectories, and one in the trace of each."""
    start_us = batch.created_at_event_time * 1000
    end_us = max(start_us, at.at_us)
    whole = batch_span_id(at.topic_id, batch.batch_seq)
    traced = list(_traced(batch, own_traces))
    yield Span(
        id=whole,
        part="admit",
        name="batch",
        start_us=start_us,
        end_us=end_us,
        attributes=_batch(batch)
        | attributes(
            algorithm=batch.algorithm,
            groups=len(batch.groups),
            members=sum(len(group.members) for group in batch.groups),
            trainable_tokens=batch.trainable_tokens,
        ),
        links=tuple(
            SpanId(context.trace_id, trajectory_span_id(batch.run_id, member.trajectory_id))
            for context, _, member in traced[:LINKS_MAX]
        ),
    )
    for context, group, member in traced:
        yield Span(
            id=SpanId(
                context.trace_id, _admit_span_id(at.topic_id, batch.batch_seq, member.trajectory_id)
            ),
            parent_id=trajectory_span_id(batch.run_id, member.trajectory_id),
            part="admit",
            name="admit",
            start_us=start_us,
            end_us=end_us,
            attributes=_batch(batch)
            | attributes(
                trajectory_id=member.trajectory_id,
                revision=member.revision,
                group_id=group.group_id,
                round=group.round,
                trainable_tokens=member.trainable_tokens,
                oldest_sync_index=member.oldest_sync_index,
            ),
            links=(whole,),
        )


def _batch(batch: ReadyBatch) -> dict[str, str | bool | int | float | tuple[str, ...]]:
    return attributes(
        run_id=batch.run_id,
        channel=batch.channel,
        batch_seq=batch.batch_seq,
        policy_version=batch.policy_version,
    )


def _traced(
    batch: ReadyBatch, own_traces: bool
) -> Iterator[tuple[Parent, BatchGroup, BatchMember]]:
    for group in batch.groups:
        for m in group.members:
            context = parent_of_trajectory(
                m.traceparent, batch.run_id, m.trajectory_key, m.trajectory_id, own_traces
            )
            if context is not None:
                yield context, group, m


def refused_spans(refused: Refused, at: RecordPlace, own_traces: bool) -> Iterator[Span]:
    """Yield a span in the trace of each refused trajectory, with the reason."""
    ids = refused.trajectory_ids
    end_us = at.at_us
    start_us = end_us if refused.event_time is None else min(refused.event_time * 1000, end_us)
    traceparents = refused.traceparents or (None,) * len(ids)
    for trajectory_id, traceparent in zip(ids, traceparents, strict=True):
        key = key_of_trajectory(trajectory_id)
        context = parent_of_trajectory(traceparent, refused.run_id, key, trajectory_id, own_traces)
        if context is None:
            continue
        place = (at.topic_id, str(at.offset), trajectory_id)
        yield Span(
            id=SpanId(context.trace_id, span_id_of("refuse", *place)),
            parent_id=trajectory_span_id(refused.run_id, trajectory_id),
            part="admit",
            name="refuse",
            start_us=start_us,
            end_us=end_us,
            attributes=attributes(
                run_id=refused.run_id,
                channel=refused.channel,
                trajectory_id=trajectory_id,
                group_id=refused.group_id,
                round=refused.round,
                reason=refused.reason,
                detail=refused.detail,
                whole_group=refused.whole_group,
            ),
        )


def version_span_id(version_id: str) -> SpanId:
    """Return the span of a weight version."""
    return SpanId(trace_id_of("version", version_id), span_id_of("version", version_id))


def version_spans(version: WeightVersion) -> Iterator[Span]:
    """Yield the span of a version, linked to its parent and its batches, and one in each batch."""
    whole = version_span_id(version.version_id)
    batches = [batch_span_id(*named) for named in _batches(version)]
    links = [version_span_id(version.parent_version)] if version.parent_version else []
    yield _trained(version, whole, None, "version", tuple([*links, *batches][:LINKS_MAX]))
    for batch in batches:
        span = SpanId(batch.trace_id, span_id_of("train", version.version_id, batch.span_id))
        yield _trained(version, span, batch.span_id, "train", (whole,))


def _batches(version: WeightVersion) -> Iterator[tuple[str, int]]:
    """Yield topic id and number of each batch of a version."""
    first, last = version.first_batch_seq, version.last_batch_seq
    if version.batches_topic_id is not None and first is not None and last is not None:
        for batch_seq in range(first, last + 1):
            yield version.batches_topic_id, batch_seq


def trained_spans(
    version: WeightVersion, batches: Iterable[ReadyBatch], own_traces: bool
) -> Iterator[Span]:
    """Yield a span in the trace of each trajectory that a version was trained on."""
    if version.batches_topic_id is None:
        return
    whole = version_span_id(version.version_id)
    for batch in batches:
        for context, _, m in _traced(batch, own_traces):
            parent = _admit_span_id(version.batches_topic_id, batch.batch_seq, m.trajectory_id)
            span = SpanId(context.trace_id, span_id_of("train", version.version_id, parent))
            yield _trained(version, span, parent, "train", (whole,))


def _trained(
    version: WeightVersion,
    span: SpanId,
    parent_id: str | None,
    name: str,
    links: tuple[SpanId, ...],
) -> Span:
    seconds = sum(version.metrics.get(metric, 0.0) for metric in WORK_SECONDS)
    return Span(
        id=span,
        parent_id=parent_id,
        part="trainer",
        name=name,
        start_us=version.created_at - round(seconds * 1e6),
        end_us=version.created_at,
        attributes=attributes(
            run_id=version.run_id,
            channel=version.channel,
            version=version.version_id,
            sync_index=version.sync_index,
            attempt=version.attempt,
            parent_version=version.parent_version,
            format=version.format,
            first_batch_seq=version.first_batch_seq,
            last_batch_seq=version.last_batch_seq,
        ),
        links=links,
    )


def loaded_spans(status: WorkerStatus) -> Iterator[Span]:
    """Yield the span of the loading that a worker reports, in the trace of the version.

    Each report until the next loading gives the same span.
    """
    if status.loaded_at is None or status.weight_version is None:
        return
    whole = version_span_id(status.weight_version)
    loading = (status.worker_id, status.weight_version, str(status.loaded_at))
    yield Span(
        id=SpanId(whole.trace_id, span_id_of("load", *loading)),
        parent_id=whole.span_id,
        part="rollout",
        name="load",
        start_us=status.loaded_at - round((status.last_load_ms or 0.0) * 1000),
        end_us=status.loaded_at,
        attributes=attributes(
            run_id=status.run_id, version=status.weight_version, worker_id=status.worker_id
        ),
    )

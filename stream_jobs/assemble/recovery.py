"""Take over one partition: protocol step 1 (`clawstream.stream_jobs.assemble.main`)."""

from __future__ import annotations

import asyncio
import time

from clawstream.runtime.kafka import BEGINNING, SourceTruncated
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.records import now_micros
from clawstream.schemas.records import AssemblyMarker
from clawstream.stream_jobs.assemble.changelog import ChangelogReader, decode_record
from clawstream.stream_jobs.assemble.changelog_writer import ChangelogWriter
from clawstream.stream_jobs.assemble.context import PartitionContext, TopicSnapshot
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.output_records import starts_of
from clawstream.stream_jobs.assemble.outputs import Outputs
from clawstream.stream_jobs.assemble.partition import PartitionProcessor
from clawstream.stream_jobs.assemble.payload.cache import PayloadCache
from clawstream.stream_jobs.assemble.payload.input_log import InputLog
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, SourceTopic
from clawstream.stream_jobs.errors import UnreadableChangelog

COLD_AFTER_MS = 600_000
"""A new owner does not cache older steps; it reads them when the trajectory closes."""
READ_LOG_TRIES = 3


async def take_over(
    partition: int, context: PartitionContext, topics: TopicSnapshot
) -> PartitionProcessor:
    """Become the owner: append the marker, restore state and payload, send unacknowledged outputs.

    Raises:
        SourceTruncated, UnreadableChangelog, FencedOut: See `clawstream.stream_jobs.errors`.
    """
    begun = time.monotonic()
    epoch = await _append_marker(partition, context, topics)
    read = await asyncio.to_thread(_read_changelog, partition, context, epoch)
    state, changelog = read.state, ChangelogWriter(partition, context, epoch, read)
    fold = AssemblyFold(state, context.limits)
    for source in (STEPS, REWARDS):
        await _check_position(partition, context, topics, fold, source, read.known)
    inputs = [
        InputLog(
            context.cluster, context.decoder, context.input(source), partition,
            context.limits.new_messages_bytes,
        )
        for source in (STEPS, REWARDS)
    ]  # fmt: skip
    cache = await asyncio.to_thread(_filled_cache, context.cache_bytes, state, inputs[STEPS])
    if changes := fold.finish_batch():
        await changelog.append_delta(changes)
    sent_again = len(state.pending.closings) + len(state.pending.revised)
    outputs = Outputs(partition, context, state, changelog, cache, inputs, topics.topic_ids)
    await outputs.emit({})
    logger().info(
        "partition_taken_over",
        partition=partition,
        epoch=epoch,
        open=len(state.opened),
        closed=len(state.closed),
        waiting=sum(map(len, state.waiting)),
        cached=len(cache),
        sent_again=sent_again,
        seconds=round(time.monotonic() - begun, 2),
    )
    return PartitionProcessor(partition, context, fold, changelog, outputs, cache, inputs)


async def _append_marker(partition: int, context: PartitionContext, topics: TopicSnapshot) -> int:
    """Append the marker and return its offset, the epoch."""
    marker = AssemblyMarker(
        worker=context.worker,
        steps_topic_id=topics.topic_ids[context.topics.steps],
        rewards_topic_id=topics.topic_ids[context.topics.rewards],
        created_at=now_micros(),
    )
    value = context.decoder.codec.encode(marker)
    ack = await context.producer.send(context.topics.assembly, None, value, partition=partition)
    return ack.offset


def _read_changelog(partition: int, context: PartitionContext, epoch: int) -> ChangelogReader:
    """Read the changelog up to the own marker (blocking). A fenced owner may be trimming its start
    meanwhile.
    """
    topic, left = context.topics.assembly, READ_LOG_TRIES
    while True:
        left -= 1
        read = ChangelogReader()
        try:
            for r in context.cluster.read_range(topic, partition, BEGINNING, epoch):
                read.read(r.offset, decode_record(context.decoder, r), len(r.value or b""))
            return read
        except SourceTruncated as e:
            if isinstance(e, UnreadableChangelog) or not left:
                raise


async def _check_position(
    partition: int,
    context: PartitionContext,
    topics: TopicSnapshot,
    fold: AssemblyFold,
    source: SourceTopic,
    known: bool,
) -> None:
    """Check a position against the topic: a new topic id restarts the input; the same id must still
    hold the offset. known: whether the changelog holds any state.
    """
    topic, state = context.input(source), fold.state
    topic_id, (low, high) = topics.topic_ids[topic], topics.watermarks[topic]
    if state.topic_ids[source] != topic_id:
        if known:
            logger().warning(
                "source_replaced", topic=topic, partition=partition, open=len(state.opened)
            )
        fold.replace_source(source, topic_id, low)
        return
    position = state.applied[source] + 1
    if position > high:
        # The previous owner may have written until our marker: compare with a later end offset.
        ends = await asyncio.to_thread(context.cluster.watermarks, topic, [partition])
        low, high = ends[partition]
    if not low <= position <= high:
        raise SourceTruncated(
            f"source truncated: {topic}-{partition} holds offsets {low} to {high - 1}, "
            f"position {position}; run clawstream status --positions"
        )


def _filled_cache(max_bytes: int, state: PartitionState, steps: InputLog) -> PayloadCache:
    """Return a cache with the payload of the open trajectories, except cold steps (blocking)."""
    since = state.time[STEPS] - COLD_AFTER_MS
    starts: dict[int, int] = {}
    for trajectory in state.opened.values():
        cold = {s.offset for s in trajectory.steps if s.at < since}
        if trajectory.meta is not None and trajectory.opened_at < since:
            cold.add(trajectory.meta)
        starts.update((o, start) for o, start in starts_of(trajectory).items() if o not in cold)
    cache = PayloadCache(max_bytes)
    for offset, payload in steps.payload(starts):
        cache.put(offset, payload)
    return cache

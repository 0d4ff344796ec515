"""The fold of assemble in a plain loop on confluent-kafka, without Faust, groups and fencing.

    python -m benchmarks.jobs.bare_loop --config FILE

It reads both inputs from their beginning, folds a batch, appends one delta a partition, waits for
it, sends trajectories, waits, sends candidates, waits: the same decisions, records and order as
`clawstream.stream_jobs.assemble.partition`. It lacks everything that survives a crash.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from clawstream.runtime.kafka.producer import producer_options
from clawstream.runtime.process.config import load
from clawstream.runtime.topics.records import cluster_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import key_of_trajectory
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.assemble import changelog
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.limits import limits_of
from clawstream.stream_jobs.assemble.output_records import (
    Assembled,
    assembled,
    candidate,
    payload_headers,
    starts_of,
)
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload
from clawstream.stream_jobs.assemble.state.changes import (
    Change,
    OutputsAcknowledged,
    PayloadWritten,
)
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, RunTrajectory

Positions = list[tuple[int, int]]
"""(partition, offset) of each part of a trajectory."""
Sent = tuple[RunTrajectory, Assembled, Positions]
WAIT_S = 0.05
"""Longest wait for a full batch."""


class Partition:
    """State of one partition."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number, self.state, self.seq = number, PartitionState(), 0
        self.fold = AssemblyFold(self.state, limits_of(settings))
        self.payload: dict[int, CachedPayload] = {}
        self.unflushed: list[Change] = []


class Loop:
    """All partitions."""

    def __init__(self, settings: Settings) -> None:
        cluster = cluster_of(settings)
        self._topics, self._codec = settings.kafka.topics, Codec()
        self._batch = settings.jobs.batch_records
        self._trajectories_id = cluster.topic_id(self._topics.trajectories)
        count = cluster.topics(self._topics.steps)[self._topics.steps]
        self._partitions = [Partition(p, settings) for p in range(count)]
        servers = {"bootstrap.servers": settings.bootstrap_servers, "log_level": 2}
        self._producer = Producer(producer_options(servers))
        reading = {"isolation.level": "read_committed", "auto.offset.reset": "error"}
        fetching = {"fetch.wait.max.ms": 50, "queued.max.messages.kbytes": 65536}
        group = {"group.id": "bare-loop", "enable.auto.commit": False}
        self._consumer = Consumer({**servers, **group, **reading, **fetching})
        inputs = (self._topics.steps, self._topics.rewards)
        self._consumer.assign([TopicPartition(t, p, 0) for t in inputs for p in range(count)])

    def turn(self) -> None:
        """Process one batch."""
        touched = self._fold(self._consumer.consume(self._batch, WAIT_S))
        for partition in touched:
            self._append_delta(partition)
        self._flush()
        closing = [p for p in touched if p.state.pending]
        sent = [self._send_trajectories(p) for p in closing]
        self._flush()
        for partition, positions in zip(closing, sent, strict=True):
            self._note_places(partition, positions)
            self._send_candidates(partition)
        self._flush()
        for partition in closing:
            acknowledged = OutputsAcknowledged()
            acknowledged.apply(partition.state)
            partition.unflushed.insert(0, acknowledged)

    def _fold(self, messages: Iterable[Message]) -> list[Partition]:
        touched: dict[int, Partition] = {}
        for m in messages:
            if m.error() is not None:
                raise KafkaException(m.error())
            partition = touched.setdefault(m.partition(), self._partitions[m.partition()])
            source = STEPS if m.topic() == self._topics.steps else REWARDS
            event = self._codec.decode(m.value())
            kept = partition.fold.record(source, m.offset(), m.timestamp()[1], m.key(), event)
            if kept is not None:
                partition.payload[m.offset()] = kept
        return list(touched.values())

    def _append_delta(self, partition: Partition) -> None:
        entries = [*partition.unflushed, *partition.fold.finish_batch()]
        if entries:
            partition.seq, partition.unflushed = partition.seq + 1, []
            value = self._codec.encode(changelog.delta(0, partition.seq, partition.state, entries))
            self._produce(self._topics.assembly, value, None, partition=partition.number)

    def _send_trajectories(self, partition: Partition) -> list[Sent]:
        state, sent = partition.state, list[Sent]()
        for key, trajectory in state.pending.closings.items():
            done = assembled(key, trajectory, state.closed[key], partition.payload)
            positions: Positions = []
            for part in done.parts:
                name = key_of_trajectory(key[1]).encode()
                self._produce(self._topics.trajectories, self._codec.encode(part), name, positions)
            for offset in starts_of(trajectory):
                del partition.payload[offset]
            sent.append((key, done, positions))
        return sent

    def _note_places(self, partition: Partition, sent: Sequence[Sent]) -> None:
        """Apply the positions of sent trajectories; they are written with the next delta."""
        for key, done, positions in sent:
            place = (self._trajectories_id, *positions[0], positions[-1][1])
            written = PayloadWritten(key, done.prompt_tokens, done.order, place)
            written.apply(partition.state)
            partition.unflushed.append(written)

    def _send_candidates(self, partition: Partition) -> None:
        state = partition.state
        if state.pending.marks or state.pending.dead_letters:
            raise RuntimeError(f"nothing of the load is late or invalid, but: {state.pending}")
        for key in state.pending.revised:
            closed = state.closed[key]
            headers = payload_headers(key, closed)
            _, value = candidate(key, closed, self._codec)
            self._produce(self._topics.candidates, value, key[0].encode(), headers=headers)

    def _produce(
        self,
        topic: str,
        value: bytes,
        key: bytes | None,
        positions: Positions | None = None,
        **more: Any,
    ) -> None:
        def delivered(error: Any, message: Message) -> None:
            if error is not None:
                raise KafkaException(error)
            if positions is not None:
                positions.append((message.partition(), message.offset()))

        self._producer.produce(topic, value, key, on_delivery=delivered, **more)

    def _flush(self) -> None:
        if self._producer.flush(30.0):
            raise RuntimeError("no acknowledgement within 30 s")


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    loop = Loop(load(parser.parse_args().config))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    while True:
        loop.turn()


if __name__ == "__main__":
    main()

"""Ready batches and their payload on Kafka, in place of assemble and admit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from clawstream.runtime.kafka import Cluster, Producer
from clawstream.runtime.topics.records import Decoder, create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    ReadyBatch,
    Refused,
    RewardValue,
    Segment,
    TrainedTokens,
    Trajectory,
    TrajectoryStep,
    WeightVersion,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.schemas.topics import partition_of

GROUPS, MEMBERS = 2, 3


@dataclass
class Feed:
    """Write trajectories, then batches that refer to them, in place of assemble and admit."""

    cluster: Cluster
    settings: Settings

    def __post_init__(self) -> None:
        self.topics, self.codec = self.settings.kafka.topics, Codec()
        self.topic = self.topics.ready_batches(self.settings.run_id, "train")
        create_topics(
            self.cluster,
            self.settings,
            [self.topics.ready_batches_spec(self.settings.run_id, "train")],
        )
        self.producer: Producer = self.cluster.producer(f"{self.topics.prefix}-feed")
        self.plain: Producer = self.cluster.producer()
        self.trajectories_id = self.cluster.topic_id(self.topics.trajectories)
        self.written: Counter[int] = Counter()

    def batch(self, seq: int, sync_every: int = 1) -> ReadyBatch:
        """Return a batch whose payload is on the log."""
        groups = []
        for g in range(GROUPS):
            members = tuple(self._member(seq, g, m) for m in range(MEMBERS))
            groups.append(BatchGroup(group_id=f"g{g}", round=seq, n=MEMBERS, members=members))
        return ReadyBatch(
            run_id=self.settings.run_id,
            channel="train",
            batch_seq=seq,
            groups=tuple(groups),
            policy_version=0,
            sync_every=sync_every,
            algorithm="cispo",
            reward_weights={},
            input_topic_id="c",
            input_partition=0,
            input_from=0,
            input_to=0,
            content_hash="",
            trainable_tokens=0,
            created_at_event_time=0,
        )

    def _member(self, seq: int, g: int, m: int) -> BatchMember:
        name = f"t{seq}-{g}-{m}"
        key, partition = name.encode(), partition_of(name.encode(), self.settings.kafka.partitions)
        parts = self._parts(name, seq + g + m)
        for part in parts:
            self.plain.put(self.topics.trajectories, key, self.codec.encode(part))
        first = self.written[partition]
        self.written[partition] += len(parts)
        last = self.written[partition] - 1
        place = Place(
            topic_id=self.trajectories_id, partition=partition, first_offset=first, last_offset=last
        )
        value = float((seq + g + m) % 3)
        reward = RewardValue(
            source="rule", name="r", function_version="1", value=value, reward_revision=0
        )
        return BatchMember(
            trajectory_id=name,
            trajectory_key=name,
            revision=0,
            place=place,
            rewards=(reward,),
            untrainable_steps=(),
            trainable_tokens=4,
        )

    def _parts(self, name: str, n: int) -> list[Trajectory]:
        """Return the parts of n trajectories; every third trajectory has two parts."""
        said = Segment(
            parent=0,
            step_index=0,
            token_ids=pack_ids([8 + n % 20, 9]),
            logprobs=pack_logprobs([-3.0] * 2),
        )
        more = Segment(
            parent=1,
            step_index=1,
            token_ids=pack_ids([10, 8 + n % 20]),
            logprobs=pack_logprobs([-3.0] * 2),
        )
        steps = tuple(
            TrajectoryStep(
                step_id=f"{name}~{i}.0",
                index=i,
                segment=i + 1,
                status="ok",
                drift="clean",
                prompt_tokens=2 + i,
                response_tokens=2,
                response_json=b"{}",
                oldest_version="default",
                newest_version="default",
                trainable=True,
                offset=i,
            )
            for i in range(2)
        )
        whole = Trajectory(
            run_id=self.settings.run_id,
            trajectory_key=name,
            trajectory_id=name,
            group_id="g",
            channel="train",
            outcome="completed",
            opened_at=0,
            closed_at=1,
            part=0,
            parts=1,
            segments=(Segment(token_ids=pack_ids([2, 5])), said, more),
            steps=steps,
        )
        if n % 3:
            return [whole]
        return [
            replace(whole, parts=2, segments=whole.segments[:2], steps=whole.steps[:1]),
            replace(whole, part=1, parts=2, segments=whole.segments[2:], steps=whole.steps[1:]),
        ]

    def write(self, *records: object) -> None:
        """Write the payload, then the records in one transaction to the ready-batches topic.

        Bytes are written unchanged.
        """
        self.plain.flush()
        with self.producer.transaction():
            for record in records:
                value = record if isinstance(record, bytes) else self.codec.encode(record)
                self.producer.put(self.topic, self.settings.run_id.encode(), value)

    def write_validation(self, batch: ReadyBatch) -> None:
        """Write a batch to channel val, as sampled by version 0."""
        groups = tuple(
            replace(g, members=tuple(replace(m, oldest_sync_index=0) for m in g.members))
            for g in batch.groups
        )
        validation = replace(batch, channel="val", groups=groups)
        topic = self.topics.ready_batches(self.settings.run_id, "val")
        with self.producer.transaction():
            self.producer.put(topic, b"r", self.codec.encode(validation))

    def refused(self) -> Refused:
        return Refused(
            run_id=self.settings.run_id,
            channel="train",
            group_id="g",
            trajectory_ids=(),
            revisions=(),
            whole_group=True,
            reason="stale",
            n=1,
            input_topic_id="c",
            input_from=0,
            input_to=0,
        )

    def versions(self) -> list[WeightVersion]:
        """Return the versions published so far.

        A transaction becomes visible a moment after its commit.
        """
        decoder = Decoder(self.cluster, self.topics.schemas)
        return [
            decoder.decode(r.value)
            for r in self.cluster.read_all(self.topics.weights, await_open=True)
        ]

    def trained(self) -> list[TrainedTokens]:
        """Return what the trainer recorded of tokens; each is on the partition of its key."""
        found = []
        for partition in range(self.settings.kafka.partitions):
            for record in self.cluster.read_all(
                self.topics.trained_tokens, partition, await_open=True
            ):
                event = self.codec.decode(record.value)
                assert record.key == event.trajectory_key.encode()
                assert partition == partition_of(record.key, self.settings.kafka.partitions)
                if isinstance(event, TrainedTokens):
                    found.append(event)
        return found

    def ids(self) -> list[str]:
        return [v.version_id.partition("/")[2] for v in self.versions()]

    def lag(self) -> int:
        """Return the lag of the trainer's group, control records included."""
        group = f"{self.topics.prefix}-trainer.{self.settings.run_id}.train"
        return self.cluster.watermarks(self.topic)[0][1] - self.cluster.committed(group).get(
            (self.topic, 0), 0
        )

"""Topics: names, keys, records and configuration.

Every producer places a record by murmur2(key) mod P.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.schemas import records as events
from clawstream.schemas.ids import check_run_id

MAX_MESSAGE_BYTES = 10 * 1024 * 1024
"""`max.message.bytes` of every topic."""
MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Maximum length of a step, reward, session event, candidate, ready batch or trajectory part.

Larger fields of incoming records become blobs.
"""
CANDIDATE_PARTITIONS = 4
_FOREVER = "-1"
REPLAYS = "replays"
"""Header of a redriven record: the id of its dead letter.

The log may contain the same record at any earlier time.
"""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """How one topic is made. `config` is Kafka's topic configuration."""

    name: str
    partitions: int
    records: tuple[type, ...]
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Topics:
    """Names of all topics under one prefix, e.g. `claw`."""

    prefix: str = "claw"

    @property
    def steps(self) -> str:
        return f"{self.prefix}.steps"

    @property
    def rewards(self) -> str:
        return f"{self.prefix}.rewards"

    @property
    def assembly(self) -> str:
        return f"{self.prefix}.assembly"

    @property
    def trajectories(self) -> str:
        return f"{self.prefix}.trajectories"

    @property
    def candidates(self) -> str:
        return f"{self.prefix}.candidates"

    @property
    def weights(self) -> str:
        return f"{self.prefix}.weights"

    @property
    def trained_tokens(self) -> str:
        return f"{self.prefix}.trained-tokens"

    @property
    def workers(self) -> str:
        return f"{self.prefix}.workers"

    @property
    def budgets(self) -> str:
        return f"{self.prefix}.budgets"

    @property
    def runs(self) -> str:
        return f"{self.prefix}.runs"

    @property
    def schemas(self) -> str:
        return f"{self.prefix}.schemas"

    @property
    def dead_letters(self) -> str:
        return f"{self.prefix}.dead-letters"

    @property
    def ready_batches_prefix(self) -> str:
        return f"{self.prefix}.ready-batches."

    def ready_batches(self, run_id: str, channel: str) -> str:
        """Ready batches of one run and channel; run ids have no dots, so the name parses back."""
        return f"{self.ready_batches_prefix}{check_run_id(run_id)}.{channel}"

    def parse_ready_batches(self, topic: str) -> tuple[str, str] | None:
        """(run_id, channel) of a ready-batches topic, None for any other."""
        if not topic.startswith(self.ready_batches_prefix):
            return None
        run_id, sep, channel = topic.removeprefix(self.ready_batches_prefix).partition(".")
        return (run_id, channel) if sep and channel in ("train", "val") else None

    def specs(self, partitions: int, steps_retention_ms: int) -> tuple[TopicSpec, ...]:
        """Return the specification of every topic except ready-batches.

        Args:
            partitions: P of the keyed topics.
            steps_retention_ms: Retention of the steps; -1: unlimited.
        """
        append_time = {"message.timestamp.type": "LogAppendTime"}
        keep = {"cleanup.policy": "delete", "retention.ms": _FOREVER, "retention.bytes": "-1"}
        long = {
            "cleanup.policy": "delete",
            "retention.ms": str(steps_retention_ms),
            "retention.bytes": "-1",
        }
        compact = {"cleanup.policy": "compact", "segment.ms": "600000"}
        return (
            self._spec(
                self.steps,
                partitions,
                (events.Step, events.SessionEvent, events.FailedCall, events.Tick),
                long | append_time,
            ),
            self._spec(
                self.rewards,
                partitions,
                (events.Reward, events.Curation, events.Assessment, events.Tick),
                keep | append_time,
            ),
            self._spec(
                self.assembly,
                partitions,
                (events.AssemblyMarker, events.AssemblyDelta, events.AssemblySnapshot),
                keep | append_time,
            ),
            self._spec(
                self.trajectories,
                partitions,
                (events.Trajectory, events.StepMark),
                long | append_time,
            ),
            self._spec(
                self.candidates,
                CANDIDATE_PARTITIONS,
                (events.Candidate, events.AdmissionPolicy, events.RunEnded, events.Tick),
                keep | append_time,
            ),
            self._spec(self.weights, 1, (events.WeightVersion,), keep | append_time),
            self._spec(
                self.trained_tokens,
                partitions,
                (events.TrainedTokens, events.TrainedTrajectory),
                long | append_time,
            ),
            self._spec(self.workers, 1, (events.WorkerStatus,), compact | append_time),
            self._spec(self.budgets, 1, (events.RolloutBudget,), compact | append_time),
            self._spec(self.runs, 1, (events.RunIndex,), compact | append_time),
            self._spec(self.schemas, 1, (events.SchemaPublished,), compact | append_time),
            self._spec(
                self.dead_letters,
                1,
                (events.DeadLetter, events.DeadLetterResolved),
                keep | append_time,
            ),
        )

    def ready_batches_spec(self, run_id: str, channel: str) -> TopicSpec:
        """Return the specification of one run and channel's admission journal: one partition."""
        return self._spec(
            self.ready_batches(run_id, channel),
            1,
            (events.ReadyBatch, events.Refused, events.Late, events.PolicyApplied),
            {
                "cleanup.policy": "delete",
                "retention.ms": _FOREVER,
                "retention.bytes": "-1",
                "message.timestamp.type": "LogAppendTime",
            },
        )

    @staticmethod
    def _spec(
        name: str, partitions: int, records: tuple[type, ...], config: Mapping[str, str]
    ) -> TopicSpec:
        return TopicSpec(
            name, partitions, records, {"max.message.bytes": str(MAX_MESSAGE_BYTES), **config}
        )


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 (32 bit, unsigned), as the Java client's default partitioner computes it."""
    length, m, mask = len(data), 0x5BD1E995, 0xFFFFFFFF
    h = (0x9747B28C ^ length) & mask
    for i in range(0, length - length % 4, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    tail = data[length - length % 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a key: murmur2(key) mod P on the positive part."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions

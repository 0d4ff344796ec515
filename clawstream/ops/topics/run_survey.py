"""Survey each run by its topics: first offset, end, and progress of its batches.

Reads the index of runs, `claw.weights`, and the journals (ready batches) of requested runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from clawstream.runtime.kafka import Cluster, KafkaError
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import PolicyApplied, ReadyBatch, Refused, WeightVersion
from clawstream.schemas.topics import Topics, partition_of
from clawstream.stream_jobs.admit.run_index import RunFinder, published_indexes


@dataclass(slots=True)
class RunSummary:
    """A run on the candidates topic. first, ended: Offsets of its first record and of its end."""

    partition: int
    first: int
    has_policy: bool = False
    ended: int | None = None


@dataclass(frozen=True, slots=True)
class JournalSummary:
    """The ready batches of a run and channel.

    end: Of the log. seen: Next candidate that admission has not read. trained: Where a trainer
    would resume; behind the last batch when all are trained; the end when no trainer reads it.
    untrained: Batches that no version is trained on yet. unreadable: Why this is unknown.
    """

    run_id: str
    channel: str
    topic: str
    low: int
    end: int
    seen: int = 0
    trained: int = 0
    untrained: int = 0
    unreadable: str | None = None


class RunSurvey:
    """The runs of one installation, read at construction; journals are read by `journal`."""

    def __init__(self, cluster: Cluster, topics: Topics, decoder: Decoder) -> None:
        """Find all runs among the candidates.

        A topic that is not listed need not be deleted: Kafka omits topics that the user may not
        describe.

        Raises:
            KafkaError: A topic that every installation has is not listed.
            Unavailable: A topic has no leader.
        """
        self._cluster, self._topics, self._decoder = cluster, topics, decoder
        self.there = cluster.topics_under(f"{topics.prefix}.")
        for name in (topics.candidates, topics.steps, topics.weights):
            if name not in self.there:
                raise KafkaError(
                    f"{name} is not seen on {cluster.bootstrap_servers}: run `clawstream topics "
                    "create`, or allow Describe on it"
                )
        self.ids = cluster.topic_ids(sorted(self.there))
        self.ends: dict[str, dict[int, tuple[int, int]]] = {}
        """Of the candidates and the journals: partition to (first offset, end)."""
        named = ((t, topics.parse_ready_batches(t)) for t in sorted(self.there))
        self.journals = {
            t: run_and_channel for t, run_and_channel in named if run_and_channel is not None
        }
        for topic in (topics.candidates, *self.journals):
            self.ends[topic] = cluster.watermarks(topic, range(self.there.get(topic, 0)))
        self.runs: dict[str, RunSummary] = {}
        indexes = published_indexes(cluster, decoder, topics)
        for partition in self.ends[topics.candidates]:
            finder = RunFinder(cluster, decoder, topics, partition, indexes)
            finder.read()
            for run_id, run in finder.runs.items():
                self.runs[run_id] = RunSummary(partition, run.first, bool(run.policies), run.ended)
        self._versions: dict[str, list[WeightVersion]] | None = None

    def partition(self, run_id: str) -> int:
        """Return the candidates partition of a run."""
        return partition_of(run_id.encode(), self.there[self._topics.candidates])

    def journal(self, topic: str, whole: bool) -> JournalSummary:
        """Return a journal; with `whole` also the fields that follow from its records."""
        run_id, channel = self.journals[topic]
        low, end = self.ends[topic][0]
        bare = JournalSummary(run_id, channel, topic, low, end)
        if not whole:
            return bare
        candidates = self._topics.candidates
        group = f"{self._topics.prefix}-admit.{run_id}.{channel}"
        committed = self._cluster.committed(group).get((candidates, self.partition(run_id)), 0)
        versions = self.versions.get(run_id, []) if channel == "train" else []
        try:
            return journal_of(
                bare,
                self._events(topic),
                self.ids[candidates],
                committed,
                versions,
                self.ids[topic],
                channel == "train",
            )
        except (Undecodable, UnknownSchema) as e:
            return replace(bare, unreadable=f"it cannot be read: {e}")

    def _events(self, topic: str) -> Iterator[tuple[int, object]]:
        return ((r.offset, self._decoder.decode(r.value)) for r in self._cluster.read_all(topic))

    @property
    def versions(self) -> Mapping[str, list[WeightVersion]]:
        """The published versions of each run, in log order."""
        if self._versions is None:
            self._versions = {}
            for record in self._cluster.read_all(self._topics.weights):
                try:
                    event = self._decoder.decode(record.value)
                except (Undecodable, UnknownSchema):
                    continue  # the trainer and the rollout workers report it
                if isinstance(event, WeightVersion):
                    self._versions.setdefault(event.run_id, []).append(event)
        return self._versions


def journal_of(
    bare: JournalSummary, events: Iterator[tuple[int, object]], candidates_id: str, committed: int,
    versions: list[WeightVersion], journal_id: str, is_trained: bool,
) -> JournalSummary:  # fmt: skip
    """Summarize a journal by its records. Pure.

    Args:
        committed: Candidates position that its admission has committed.
        versions: Of the run, in log order.
        journal_id: Topic id of the journal.
        is_trained: Whether trainers read the channel.
    """
    seen, batches = committed, list[tuple[int, int]]()
    for offset, event in events:
        if isinstance(event, ReadyBatch):
            batches.append((event.batch_seq, offset + 1))
        if isinstance(event, ReadyBatch | Refused) and event.input_topic_id == candidates_id:
            seen = max(seen, event.input_to)
        elif isinstance(event, PolicyApplied) and event.input_topic_id == candidates_id:
            seen = max(seen, event.from_offset + 1)
    if not is_trained or not (batches or versions):
        trained, untrained = bare.end, 0
    else:
        newest = versions[-1] if versions else None
        last = last_trained(versions, newest.version_id if newest else None, journal_id)
        untrained = sum(last is None or seq > last for seq, _ in batches)
        if untrained and newest is not None:  # it goes on, and may have to resume
            last = last_trained(versions, newest.checkpoint_version, journal_id)
        done = [behind for seq, behind in batches if last is not None and seq <= last]
        trained = max(done, default=bare.low)
    return replace(bare, seen=seen, trained=trained, untrained=untrained)


def last_trained(
    versions: list[WeightVersion], version_id: str | None, journal_id: str
) -> int | None:
    """Return the last batch of a journal that a version or its ancestors were trained on."""
    by_id: Callable[[str | None], WeightVersion | None] = {v.version_id: v for v in versions}.get  # type: ignore[assignment]
    version = by_id(version_id)
    while version is not None and version.batches_topic_id == journal_id:
        if version.last_batch_seq is not None:
            return version.last_batch_seq
        version = by_id(version.parent_version)
    return None

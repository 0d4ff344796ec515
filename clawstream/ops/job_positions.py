"""List the stored positions of assemble, the reward job and admission. Reads only."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.kafka import Cluster
from runtime.topics.positions import StoredPosition
from runtime.topics.records import Decoder
from schemas.records import Late, PolicyApplied
from schemas.settings import Settings
from schemas.topics import partition_of
from stream_jobs.admit.decisions.journal import decode_journal_record
from stream_jobs.admit.decisions.journal_start import first_offset
from stream_jobs.assemble.changelog import ChangelogReader, decode_record
from stream_jobs.errors import UnreadableChangelog, UnreadableJournal


def positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """What the changelog, the reward job's group and every journal say."""
    decoder = Decoder(cluster, settings.kafka.topics.schemas)
    return [
        *_assemble(settings, cluster, decoder),
        *_reward(settings, cluster),
        *_admit(settings, cluster, decoder),
    ]


def _assemble(settings: Settings, cluster: Cluster, decoder: Decoder) -> Iterator[StoredPosition]:
    """What each partition of the changelog has applied of its inputs."""
    topics = settings.kafka.topics
    for partition in range(cluster.topics(topics.assembly).get(topics.assembly, 0)):
        log = ChangelogReader()
        flaw, at = None, 0
        for record in cluster.read_all(topics.assembly, partition):
            at = record.offset
            try:
                log.read(at, decode_record(decoder, record), len(record.value or b""))
            except UnreadableChangelog as e:
                flaw = str(e)
                break
        if flaw is not None:
            yield StoredPosition(
                "assemble", "unreadable changelog", topics.assembly, None, partition, at, flaw
            )
        elif log.known:
            for topic, topic_id, applied in zip(
                (topics.steps, topics.rewards), log.state.topic_ids, log.state.applied, strict=True
            ):
                yield StoredPosition(
                    "assemble", "changelog", topic, topic_id, partition, applied + 1
                )


def rewards_applied(settings: Settings, cluster: Cluster) -> dict[int, int]:
    """Return for each partition of the rewards the offset below which assemble has applied all."""
    rewards = settings.kafka.topics.rewards
    today = cluster.topic_ids([rewards]).get(rewards)
    stored = _assemble(settings, cluster, Decoder(cluster, settings.kafka.topics.schemas))
    return {
        p.partition: p.offset
        for p in stored
        if (p.topic, p.topic_id, p.flaw) == (rewards, today, None)
    }


def _reward(settings: Settings, cluster: Cluster) -> Iterator[StoredPosition]:
    """The one process whose position is what its group has committed."""
    for (topic, partition), offset in sorted(
        cluster.committed(f"{settings.kafka.topic_prefix}-reward").items()
    ):
        yield StoredPosition("reward", "group", topic, None, partition, offset)


def _admit(settings: Settings, cluster: Cluster, decoder: Decoder) -> Iterator[StoredPosition]:
    """Yield for each journal the lowest undecided and the last decided candidate."""
    topics, there = settings.kafka.topics, cluster.topics()
    for journal in sorted(there):
        named = topics.parse_ready_batches(journal)
        if named is None or topics.candidates not in there:
            continue
        topic_id: str | None = None
        undecided: int | None = None
        seen = 0
        if first := first_offset(cluster, journal):
            # Trimmed, so its run is over: admission does not start on it, and needs no candidates
            # any more.
            yield StoredPosition(
                "admit", f"{named[0]}.{named[1]} is over, trimmed", journal, None, 0, first
            )
            continue
        for record in cluster.read_all(journal):
            try:
                event = decode_journal_record(decoder, record)
            except UnreadableJournal as e:
                yield StoredPosition(
                    "admit",
                    "unreadable journal",
                    journal,
                    None,
                    record.partition,
                    record.offset,
                    str(e),
                )
                break
            if isinstance(event, Late):
                continue
            if event.input_topic_id != topic_id:
                topic_id, undecided, seen = event.input_topic_id, None, 0
            if isinstance(event, PolicyApplied):
                seen = max(seen, event.from_offset)
            else:
                undecided, seen = event.input_from, max(seen, event.input_to)
        if topic_id is not None:
            partition = partition_of(named[0].encode(), there[topics.candidates])
            place = f"{named[0]}.{named[1]}"
            if undecided is not None:
                yield StoredPosition(
                    "admit",
                    f"{place} undecided from",
                    topics.candidates,
                    topic_id,
                    partition,
                    undecided,
                )
            yield StoredPosition(
                "admit", f"{place} decided to", topics.candidates, topic_id, partition, seen
            )

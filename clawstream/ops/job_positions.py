"""List the stored positions of assemble, the reward job and admission. Reads only."""

from __future__ import annotations

from collections.abc import Iterator

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.positions import StoredPosition
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.records import Late, PolicyApplied
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.admit.decisions.journal import decode_journal_record
from clawstream.stream_jobs.admit.decisions.recovery import first_offset
from clawstream.stream_jobs.assemble.changelog import ChangelogReader, decode_record
from clawstream.stream_jobs.errors import UnreadableChangelog, UnreadableJournal


def positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """Return the positions in the changelog, the reward job's group and every journal."""
    decoder = Decoder(cluster, settings.kafka.topics.schemas)
    return [
        *_assemble(settings, cluster, decoder),
        *_reward(settings, cluster),
        *_admit(settings, cluster, decoder),
    ]


def _assemble(settings: Settings, cluster: Cluster, decoder: Decoder) -> Iterator[StoredPosition]:
    """Yield the position of each input partition in the changelog."""
    topics = settings.kafka.topics
    for partition in range(cluster.topics(topics.assembly).get(topics.assembly, 0)):
        log = ChangelogReader()
        for record in cluster.read_all(topics.assembly, partition):
            at = record.offset
            try:
                log.read(at, decode_record(decoder, record), len(record.value or b""))
            except UnreadableChangelog as e:
                place = ("unreadable changelog", topics.assembly, None, partition, at, str(e))
                yield StoredPosition("assemble", *place)
                break
        else:
            if log.known:
                inputs, state = (topics.steps, topics.rewards), log.state
                for topic, topic_id, applied in zip(
                    inputs, state.topic_ids, state.applied, strict=True
                ):
                    at_input = (topic, topic_id, partition, applied + 1)
                    yield StoredPosition("assemble", "changelog", *at_input)


def rewards_applied(settings: Settings, cluster: Cluster) -> dict[int, int]:
    """Return for each partition of the rewards the offset below which assemble has applied all."""
    rewards = settings.kafka.topics.rewards
    today = cluster.topic_ids([rewards]).get(rewards)
    stored = _assemble(settings, cluster, Decoder(cluster, settings.kafka.topics.schemas))
    return {
        p.partition: p.offset
        for p in stored
        if (p.topic, p.topic_id, p.error) == (rewards, today, None)
    }


def _reward(settings: Settings, cluster: Cluster) -> Iterator[StoredPosition]:
    """Yield the committed offsets of the reward job's group."""
    for (topic, partition), offset in sorted(
        cluster.committed(f"{settings.kafka.topic_prefix}-reward").items()
    ):
        yield StoredPosition("reward", "group", topic, None, partition, offset)


def _admit(settings: Settings, cluster: Cluster, decoder: Decoder) -> Iterator[StoredPosition]:
    """Yield for each journal the lowest undecided and the last decided candidate."""
    topics, there = settings.kafka.topics, cluster.topics()
    if topics.candidates not in there:
        return
    for journal in sorted(there):
        if (named := topics.parse_ready_batches(journal)) is None:
            continue
        run, name = named[0], ".".join(named)
        if first := first_offset(cluster, journal):
            # Trimmed, so its run is over: admission does not start on it, and needs no candidates.
            yield StoredPosition("admit", f"{name} is over, trimmed", journal, None, 0, first)
            continue
        topic_id: str | None = None
        undecided: int | None = None
        decided = 0
        for record in cluster.read_all(journal):
            try:
                event = decode_journal_record(decoder, record)
            except UnreadableJournal as e:
                at = (record.partition, record.offset, str(e))
                yield StoredPosition("admit", "unreadable journal", journal, None, *at)
                break
            if isinstance(event, Late):
                continue
            if event.input_topic_id != topic_id:
                topic_id, undecided, decided = event.input_topic_id, None, 0
            if isinstance(event, PolicyApplied):
                decided = max(decided, event.from_offset)
            else:
                undecided, decided = event.input_from, max(decided, event.input_to)
        if topic_id is not None:
            partition = partition_of(run.encode(), there[topics.candidates])
            for state, offset in (("undecided from", undecided), ("decided to", decided)):
                if offset is not None:
                    place = (f"{name} {state}", topics.candidates, topic_id, partition, offset)
                    yield StoredPosition("admit", *place)

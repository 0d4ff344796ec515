"""Run admission again over recorded candidates, under the recorded or another policy.

Reads only. The decisions of a live admission over many restarts must equal those of one fold over
its whole input (invariant 13b).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from clawstream.ops.replay.report import Outcome, described, journal
from clawstream.ops.replay.run import fields_not_set
from clawstream.runtime.kafka import Cluster, SourceTruncated
from clawstream.runtime.topics.records import Decoder, cluster_of, now_micros
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import AdmissionPolicy, Channel, Late, PolicyApplied, ReadyBatch
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.admit.decisions.journal import (
    CandidateLog,
    InputRecord,
    JournalRecord,
    decode_input,
)
from clawstream.stream_jobs.admit.decisions.recovery import check_complete
from clawstream.stream_jobs.admit.decisions.state import ResumePoint, resume_from_journal
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.admit.policy import policy_of
from clawstream.stream_jobs.errors import StreamJobError


class NothingRecorded(StreamJobError):
    """The run has no batches or no candidates. The message names the topic."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The records of a run and channel.

    resume_point: Decisions on earlier candidates topics. candidates: Reads the log.
    """

    source: CandidateLog
    resume_point: ResumePoint
    journal: list[JournalRecord]
    candidates: Callable[[], Iterator[InputRecord]]


def check(settings: Settings, channel: Channel) -> dict[str, Any]:
    """Fold the recorded candidates under the recorded policies and compare the batches.

    `first_difference` is None when all batches are equal and in order. Batches of a deleted
    candidates topic cannot be checked and are counted. Raises NothingRecorded, SourceTruncated.
    """
    recorded = read(cluster_of(settings), settings, channel)
    wanted = [described(r) for r in recorded.journal if isinstance(r, ReadyBatch)]
    admission = AdmissionFold(settings.run_id, channel, recorded.source, recorded.resume_point)
    found = Outcome().fold(admission, recorded.candidates())
    return {
        **_report(settings, channel, recorded, found),
        "batches": len(wanted),
        "not_checked": recorded.resume_point.next_seq,
        "first_difference": first_difference(wanted, found.batches),
    }


def what_if(settings: Settings, channel: Channel) -> dict[str, Any]:
    """Fold the recorded candidates under the newest policy with the fields of the settings."""
    recorded = read(cluster_of(settings), settings, channel)
    applied = [r.policy for r in recorded.journal if isinstance(r, PolicyApplied)]
    policy = policy_of(settings, 1, now_micros())
    kept = fields_not_set(settings.admit.policy) if applied else ()
    policy = replace(policy, **{name: getattr(applied[-1], name) for name in kept})
    resume_point = ResumePoint(policy=policy)
    admission = AdmissionFold(settings.run_id, channel, recorded.source, resume_point)
    entries = (e for e in recorded.candidates() if not isinstance(e.event, AdmissionPolicy))
    found = Outcome().fold(admission, entries)
    return _report(settings, channel, recorded, found)


def _report(
    settings: Settings, channel: Channel, recorded: Recorded, found: Outcome
) -> dict[str, Any]:
    return {
        "run": settings.run_id,
        "channel": channel,
        "candidates": found.candidates,
        "recorded": Outcome().add(recorded.journal).as_dict(),
        "replayed": found.as_dict(),
    }


def read(cluster: Cluster, settings: Settings, channel: Channel) -> Recorded:
    """Read all records of the run and channel. Raises NothingRecorded, SourceTruncated."""
    topics, run = settings.kafka.topics, settings.run_id
    there = cluster.topics()
    topic, journal_topic = topics.candidates, topics.ready_batches(run, channel)
    for name in (topic, journal_topic):
        if name not in there:
            raise NothingRecorded(f"there is no topic {name} on {cluster.bootstrap_servers}")
    decoder = Decoder(cluster, topics.schemas)
    partition = partition_of(run.encode(), there[topic])
    source = CandidateLog(cluster.topic_id(topic), partition, there[topics.steps])
    low = cluster.watermarks(topic, [partition])[partition][0]
    check_complete(cluster, journal_topic)
    whole = list(journal(cluster, decoder, journal_topic))
    first = next(
        (
            i
            for i, r in enumerate(whole)
            if not isinstance(r, Late) and r.input_topic_id == source.topic_id
        ),
        None,
    )
    if first is None:
        raise NothingRecorded(f"{journal_topic} has no decision on the current topic {topic}")
    opened = next((r for r in whole[first:] if isinstance(r, PolicyApplied)), None)
    if opened is not None and opened.from_offset < low:
        raise SourceTruncated(
            f"source truncated: {topic}-{partition} begins at {low}, run {run} at "
            f"{opened.from_offset}: its beginning is gone"
        )
    resume_point = resume_from_journal(whole[:first], source.topic_id, low)
    return Recorded(
        source,
        resume_point,
        whole[first:],
        partial(_candidates, cluster, decoder, topic, partition, run),
    )


def first_difference(
    wanted: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the first differing batch, recorded and replayed, or None.

    Batches that a live admission had not decided yet when its journal was read are not compared.
    """
    for index, batch in enumerate(wanted):
        again = found[index] if index < len(found) else None
        if again is None or again["content_hash"] != batch["content_hash"]:
            return {"index": index, "recorded": batch, "replayed": again}
    return None


def _candidates(
    cluster: Cluster, decoder: Decoder, topic: str, partition: int, run: str
) -> Iterator[InputRecord]:
    """Yield the log as admission reads it: ticks and records of the run; skips unreadable ones."""
    for record in cluster.read_all(topic, partition):
        with suppress(Undecodable, UnknownSchema, ValueError):
            entry = decode_input(decoder, record, run)
            if entry is not None:
                yield entry

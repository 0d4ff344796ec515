"""Records that enter admission, and records that it writes to its journal. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.ids import is_run
from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    Late,
    Place,
    PolicyApplied,
    ReadyBatch,
    Refused,
    RunEnded,
    Tick,
)
from clawstream.stream_jobs.errors import UnreadableJournal
from clawstream.stream_jobs.worker.payload import payload_place

JournalRecord = ReadyBatch | Refused | Late | PolicyApplied


@dataclass(frozen=True, slots=True)
class CandidateLog:
    """The input log: topic id, partition, and number of source partitions that send ticks."""

    topic_id: str
    partition: int
    tickers: int


@dataclass(frozen=True, slots=True)
class InputRecord:
    """One input record. place: place of the payload, from the headers; None when there is none."""

    offset: int
    event: Candidate | AdmissionPolicy | RunEnded | Tick
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Invalid:
    """A record that cannot be applied. Goes to the dead letters, not to the journal."""

    offset: int
    detail: str


Decision = JournalRecord | Invalid


def decode_input(decoder: Decoder, record: Record, run_id: str) -> InputRecord | None:
    """Decode a record of the candidates for the fold of a run; None for one of another run.

    Raises:
        Undecodable, UnknownSchema: The value cannot be read.
        ValueError: The record does not belong there.
    """
    mine = record.key == run_id.encode()
    if not mine and record.key is not None and is_run(record.key):
        return None
    event = decoder.decode(record.value)
    if not isinstance(event, Candidate | AdmissionPolicy | RunEnded | Tick):
        raise ValueError(f"a {type(event).__name__} does not belong on {record.topic}")
    if mine and not isinstance(event, Tick) and event.run_id != run_id:
        raise ValueError(f"key is run {run_id}, record is of run {event.run_id}")
    place = payload_place(record.headers) if isinstance(event, Candidate) else None
    return InputRecord(record.offset, event, place)


def decode_journal_record(decoder: Decoder, record: Record) -> JournalRecord:
    """Decode a record of the journal. Raises UnreadableJournal."""
    where = f"{record.topic}-{record.partition} offset {record.offset}"
    try:
        event = decoder.decode(record.value)
    except UnknownSchema as e:
        raise UnreadableJournal(
            f"{where}: {e}. A newer release has written it: run that one"
        ) from e
    except Undecodable as e:
        raise UnreadableJournal(
            f"{where}: {e}. What it decided can't be known; an operator must look"
        ) from e
    if not isinstance(event, JournalRecord):
        raise UnreadableJournal(
            f"{where}: a {type(event).__name__} is no decision; an operator must look"
        )
    return event


def content_hash(batch: ReadyBatch) -> str:
    """Return the SHA-256 of a batch's canonical content: without clock, run id, places and hash."""
    plain: dict[str, Any] = {
        "channel": batch.channel,
        "batch_seq": batch.batch_seq,
        "policy_version": batch.policy_version,
        "sync_every": batch.sync_every,
        "algorithm": batch.algorithm,
        "reward_weights": dict(batch.reward_weights),
        "groups": [
            {
                "group_id": g.group_id,
                "round": g.round,
                "n": g.n,
                "members": [
                    {
                        "trajectory_id": m.trajectory_id,
                        "trajectory_key": m.trajectory_key,
                        "revision": m.revision,
                        "rewards": [asdict(r) for r in m.rewards],
                        "untrainable_steps": m.untrainable_steps,
                        "trainable_tokens": m.trainable_tokens,
                        "oldest_sync_index": m.oldest_sync_index,
                    }
                    for m in g.members
                ],
            }
            for g in batch.groups
        ],
    }
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()

"""What goes into admission, what comes out, and what its output topic, the journal, tells it after a restart. Pure.

After a crash admission folds the candidates again from `resume_from`. What the journal has decided folds to nothing; the rest is, at
the last journaled step, exactly what it was: groups half full, batches half full, deadlines. Only ticks before `resume_from` are
needed besides, for event time; the reader fetches them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from runtime.kafka import Record
from runtime.records import Decoder
from schemas.errors import Undecodable, UnknownSchema
from schemas.events import AdmissionPolicy, Candidate, Late, Place, PolicyApplied, ReadyBatch, Refused, RunEnded, Tick
from stream_jobs.errors import UnreadableJournal
from stream_jobs.group import GroupKey
from stream_jobs.policy import is_of_settings
from stream_jobs.rounds import Rounds

Journaled = ReadyBatch | Refused | Late | PolicyApplied


@dataclass(frozen=True, slots=True)
class Source:
    """The log that is folded: topic id and partition of the candidates, and how many partitions write ticks to it."""

    topic_id: str
    partition: int
    tickers: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of that log. place: of the payload, from a candidate's headers; None when it has none."""

    offset: int
    event: Candidate | AdmissionPolicy | RunEnded | Tick
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Invalid:
    """A record that can't be obeyed. For the dead letters, not for the journal."""

    offset: int
    detail: str


Decision = Journaled | Invalid


class Decided(NamedTuple):
    """A trajectory that was admitted (batch_seq) or refused (None), the highest revision seen of it, and when, in log time."""

    revision: int
    batch_seq: int | None
    at: int


@dataclass(slots=True)
class Past:
    """What was decided. Offsets are of the candidates topic that exists today; there are none when it was made anew (`renewed`).

    policy: in force at `resume_from`; newest: the last one applied; of_settings: the last one of them that settings have published.
    gone: members refused one by one, of rounds that are still open; turned: refused because such a round was sealed.
    replay_until: offset of the last step in the journal; below it every decision there was is in the journal.
    """

    decided: dict[str, Decided] = field(default_factory=dict)
    rounds: dict[str, Rounds] = field(default_factory=dict)
    gone: Counter[GroupKey] = field(default_factory=Counter)
    turned: Counter[GroupKey] = field(default_factory=Counter)
    next_seq: int = 0
    policy: AdmissionPolicy | None = None
    newest: AdmissionPolicy | None = None
    of_settings: AdmissionPolicy | None = None
    resume_from: int = 0
    replay_until: int = 0
    input_to: int = 0
    renewed: bool = False


def past_of(journal: Iterable[Journaled], topic_id: str, low: int) -> Past:
    """The past that a journal tells. topic_id: of today's candidates topic; low: the first offset that it has."""
    past = Past(resume_from=low, replay_until=low, input_to=low)
    here: str | None = None
    applied: list[PolicyApplied] = []
    for record in journal:
        found = here if isinstance(record, Late) else record.input_topic_id
        if found != here:  # the candidates topic was made anew
            here, applied = found, []
            past.resume_from, past.replay_until, past.input_to = low, low, low
        match record:
            case ReadyBatch():
                _admitted(past, record)
            case Refused():
                _refused(past, record)
            case Late():
                old = past.decided.get(record.trajectory_id)
                at = old.at if old is not None else 0
                past.decided[record.trajectory_id] = Decided(record.revision, record.missed_batch_seq, at)
            case PolicyApplied():
                applied.append(record)
                past.newest = record.policy
                past.of_settings = record.policy if is_of_settings(record.policy) else past.of_settings
                past.replay_until = max(past.replay_until, record.from_offset)
                past.input_to = max(past.input_to, record.from_offset)
        if not isinstance(record, PolicyApplied):
            past.replay_until = max(past.replay_until, record.input_to - 1)
            past.input_to = max(past.input_to, record.input_to)
        if isinstance(record, ReadyBatch | Refused):
            past.resume_from = record.input_from
    if here is not None and here != topic_id:
        past.renewed, past.policy = True, past.newest
        past.resume_from, past.replay_until, past.input_to = low, low, low
    else:
        past.policy = next((a.policy for a in reversed(applied) if a.from_offset <= past.resume_from), None)
    return past


def _admitted(past: Past, batch: ReadyBatch) -> None:
    at = batch.created_at_event_time
    past.next_seq = batch.batch_seq + 1
    for group in batch.groups:
        for member in group.members:
            past.decided[member.trajectory_id] = Decided(member.revision, batch.batch_seq, at)
        _close(past, (group.group_id, group.round), group.n, len(group.members), at)


def _refused(past: Past, refused: Refused) -> None:
    at = refused.event_time or 0
    for tid, revision in zip(refused.trajectory_ids, refused.revisions, strict=True):
        past.decided[tid] = Decided(revision, None, at)
    if refused.round is None:
        return
    key = (refused.group_id, refused.round)
    if refused.whole_group:
        _close(past, key, refused.n, len(refused.trajectory_ids), at)
    elif refused.reason != "round_closed":
        past.gone[key] += 1
    elif (rounds := past.rounds.get(refused.group_id)) is not None and rounds.closed(refused.round):
        rounds.turned_away(refused.round)
    else:
        past.turned[key] += 1


def _close(past: Past, key: GroupKey, n: int, members: int, at: int) -> None:
    arrived = members + past.gone.pop(key, 0)
    rounds = past.rounds.setdefault(key[0], Rounds())
    rounds.seal(key[1], at, n - arrived - past.turned.pop(key, 0))
    rounds.close(key[1], at)


def journaled_by(decoder: Decoder, record: Record) -> Journaled:
    """What a record of the journal says. Raises UnreadableJournal."""
    where = f"{record.topic}-{record.partition} offset {record.offset}"
    try:
        event = decoder.decode(record.value)
    except UnknownSchema as e:
        raise UnreadableJournal(f"{where}: {e}. A newer release has written it: run that one") from e
    except Undecodable as e:
        raise UnreadableJournal(f"{where}: {e}. What it decided can't be known; an operator must look") from e
    if not isinstance(event, Journaled):
        raise UnreadableJournal(f"{where}: a {type(event).__name__} is no decision; an operator must look")
    return event


def content_hash(batch: ReadyBatch) -> str:
    """sha256 over the canonical bytes of what a batch holds: no clock, no run id, no place, not the hash itself."""
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
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

"""Summarize admission: batches with content hashes, refusals by reason, late revisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.kafka import Cluster
from runtime.topics.records import Decoder
from schemas.records import Candidate, Late, PolicyApplied, ReadyBatch, Refused
from stream_jobs.admit.decisions.journal import Decision, InputRecord, JournalRecord
from stream_jobs.admit.fold import AdmissionFold


@dataclass(slots=True)
class Outcome:
    """The decisions of one admission: batches, refusals by reason, late revisions."""

    candidates: int = 0
    batches: list[dict[str, Any]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    late: int = 0

    def add(self, decisions: Iterable[Decision]) -> Outcome:
        """Add decisions; return self."""
        for decision in decisions:
            match decision:
                case ReadyBatch():
                    self.batches.append(described(decision))
                case Refused():
                    self.refused[decision.reason] += 1
                case Late():
                    self.late += 1
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for a report."""
        return {"batches": self.batches, "refused": dict(self.refused), "late": self.late}

    def fold(self, admission: AdmissionFold, entries: Iterable[InputRecord]) -> Outcome:
        """Fold a log from its beginning, add the decisions, and return self."""
        self.add(admission.initial_records())
        for entry in entries:
            self.candidates += isinstance(entry.event, Candidate)
            self.add(admission.fold(entry))
        return self


def journal(cluster: Cluster, decoder: Decoder, topic: str) -> Iterator[JournalRecord]:
    """Yield all decisions on a ready-batches topic."""
    for record in cluster.read_all(topic):
        event = decoder.decode(record.value)
        if isinstance(event, ReadyBatch | Refused | Late | PolicyApplied):
            yield event


def described(batch: ReadyBatch) -> dict[str, Any]:
    """Summarize a batch."""
    return {
        "batch_seq": batch.batch_seq,
        "content_hash": batch.content_hash,
        "admission_policy_version": batch.policy_version,
        "groups": len(batch.groups),
        "trajectories": sum(len(g.members) for g in batch.groups),
        "trainable_tokens": batch.trainable_tokens,
    }

"""Summarize admission: batches with content hashes and rewards, refusals, late revisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.records import Candidate, Late, PolicyApplied, ReadyBatch, Refused
from clawstream.schemas.reward_matching import groups_without_reward, training_reward
from clawstream.stream_jobs.admit.decisions.journal import Decision, InputRecord, JournalRecord
from clawstream.stream_jobs.admit.fold import AdmissionFold


@dataclass(slots=True)
class Outcome:
    """The decisions of one admission: batches, refusals by reason, late revisions."""

    candidates: int = 0
    batches: list[dict[str, Any]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    late: int = 0
    rewards: list[float] = field(default_factory=list)
    groups_without_reward: int = 0

    def add(self, decisions: Iterable[Decision]) -> Outcome:
        """Add decisions; return self."""
        for decision in decisions:
            match decision:
                case ReadyBatch():
                    self.batches.append(described(decision))
                    self.rewards += rewards_of(decision)
                    self.groups_without_reward += len(groups_without_reward(decision))
                case Refused():
                    self.refused[decision.reason] += 1
                case Late():
                    self.late += 1
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for a report."""
        return {
            "batches": self.batches,
            "refused": dict(self.refused),
            "late": self.late,
            "reward_mean": mean(self.rewards),
            "groups_without_reward": self.groups_without_reward,
        }

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
        "reward_mean": mean(rewards_of(batch)),
    }


def rewards_of(batch: ReadyBatch) -> list[float]:
    """Return the training rewards of the trajectories that have one."""
    found = (
        training_reward(batch.reward_weights, member.rewards)
        for group in batch.groups
        for member in group.members
    )
    return [value for value in found if value is not None]


def mean(rewards: Sequence[float]) -> float | None:
    """Return the mean, rounded; None without any."""
    return round(fmean(rewards), 6) if rewards else None

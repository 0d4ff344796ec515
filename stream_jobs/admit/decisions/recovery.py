"""Recover the decisions of a run and channel from its journal and the checkpoint. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import Channel, WeightVersion
from clawstream.stream_jobs.admit.decisions.budget import BudgetFold
from clawstream.stream_jobs.admit.decisions.checkpoint import CheckpointFile, JournalPosition
from clawstream.stream_jobs.admit.decisions.journal import (
    CandidateLog,
    JournalRecord,
    decode_journal_record,
)
from clawstream.stream_jobs.admit.decisions.state import (
    DecisionState,
    ResumePoint,
    resume_from_journal,
)
from clawstream.stream_jobs.errors import UnreadableJournal


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where admission goes on. records: Journal records that were read, after the checkpoint.

    position: The last record of the journal; None when it is empty.
    """

    resume_point: ResumePoint
    budget: BudgetFold
    position: JournalPosition | None
    records: int


class JournalReader:
    """The journal of a run and channel, as it is at the start of admission."""

    def __init__(
        self, cluster: Cluster, decoder: Decoder, topic: str, run_id: str, channel: Channel
    ) -> None:
        self._cluster, self._decoder = cluster, decoder
        self.topic, self.id = topic, cluster.topic_id(topic)
        self._run, self._channel = run_id, channel

    def recover(
        self, source: CandidateLog, low: int, checkpoint: CheckpointFile, weights: str, log: Any
    ) -> Recovered:
        """Read the journal behind the checkpoint, or all of it without a usable one.

        Args:
            source: The candidates topic as it is now.
            low: The first offset that the candidates still hold.
            weights: Topic of the weight versions.

        Raises:
            UnreadableJournal: The journal is incomplete, recreated or unreadable.
        """
        check_complete(self._cluster, self.topic)
        state, position = self._load(checkpoint)
        budget = state.budget = state.budget or BudgetFold(self._run, self._channel, self.id)
        count, last = 0, None

        def records() -> Iterable[JournalRecord]:
            nonlocal count, last
            first = None if position is None else position.offset + 1
            for record in self._cluster.read_all(self.topic, first=first):
                decision = decode_journal_record(self._decoder, record)
                budget.apply(record.offset, decision)
                yield decision
                count, last = count + 1, record

        resume_point = resume_from_journal(records(), source.topic_id, low, state)
        if resume_point.renewed:
            log.warning(
                "candidates_recreated", topic_id=source.topic_id, next=resume_point.next_seq
            )
        if last is not None:
            position = JournalPosition.of(self.id, last.offset, last.value)
        elif position is None and self._channel == "train":  # `val` has no staleness gate
            self._check_not_recreated(weights)
        return Recovered(resume_point, budget, position, count)

    def _load(self, checkpoint: CheckpointFile) -> tuple[DecisionState, JournalPosition | None]:
        """Load the checkpoint if the journal still holds the last record that it covers."""
        found = checkpoint.load(self.id, self._cluster.watermarks(self.topic, [0])[0][1])
        if found is not None:
            at = found[1].offset
            there = [
                JournalPosition.of(self.id, r.offset, r.value)
                for r in self._cluster.read_range(self.topic, 0, at, at)
            ]
            if there == [found[1]]:
                return found
            checkpoint.reject(f"the journal has another record at offset {at}")
        return DecisionState(), None

    def _check_not_recreated(self, weights: str) -> None:
        """Compare a journal without records with the versions that the run has published.

        Batches of a new journal count from 0, and staleness is computed from that number: for
        weights that were trained further, every group would pass, however stale.

        Raises:
            UnreadableJournal: A version was trained from a journal with another id.
        """
        for record in self._cluster.read_all(weights):
            if not (record.key or b"").startswith(f"{self._run}/".encode()):
                continue
            try:
                version = self._decoder.decode(record.value)
            except (Undecodable, UnknownSchema):
                continue  # the lake dead-letters it
            if not isinstance(version, WeightVersion) or version.last_batch_seq is None:
                continue
            if version.batches_topic_id not in (None, self.id):
                raise UnreadableJournal(
                    f"{self.topic} was recreated (id {self.id}), but {version.version_id} was "
                    f"trained from batches up to {version.last_batch_seq} of its predecessor (id "
                    f"{version.batches_topic_id}), whose decisions are lost. Restore it, or take "
                    "another run_id, with trainer.model_path set to the published weights"
                )


def first_offset(cluster: Cluster, journal: str) -> int:
    """Return the first offset of the journal; 0 when it is complete."""
    return cluster.watermarks(journal, [0])[0][0]


def check_complete(cluster: Cluster, journal: str) -> None:
    """Raise UnreadableJournal when the journal has lost its beginning: decisions would repeat."""
    first = first_offset(cluster, journal)
    if first > 0:
        raise UnreadableJournal(
            f"{journal} begins at offset {first}: earlier decisions are lost. Either its run has "
            "ended and `clawstream topics trim` removed them: take another run_id. Or retention "
            "removed them from a live run, which cannot go on either"
        )

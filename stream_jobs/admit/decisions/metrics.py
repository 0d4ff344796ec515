"""Prometheus metrics of admission's decisions."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

from clawstream.schemas.records import Late, ReadyBatch, Refused
from clawstream.stream_jobs.admit.decisions.journal import JournalRecord


class DecisionMetrics:
    """All metrics, with the prefix clawstream_admit_; they count from the start of the process."""

    def __init__(self, channels: Iterable[str]) -> None:
        """Show the totals of the channels from the start: without a series no alert sees a 0."""
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(
                f"clawstream_admit_{name}", text, ("channel", *labels), registry=self.registry
            )

        self.batches = counter("batches", "Ready batches")
        self.groups = counter("groups", "Groups in ready batches")
        self.tokens = counter("tokens", "Trainable tokens in ready batches")
        self.refused_groups = counter("refused_groups", "Groups refused as a whole", "reason")
        self.refused_members = counter(
            "refused_members", "Refused trajectories, those of refused groups included", "reason"
        )
        self.late = counter("late", "Revisions that came after their trajectory was decided")
        for channel in channels:
            for total in (self.batches, self.groups, self.tokens, self.late):
                total.labels(channel)

    def count(self, channel: str, decision: JournalRecord) -> None:
        """Count one decision that is in the journal."""
        if isinstance(decision, ReadyBatch):
            self.batches.labels(channel).inc()
            self.groups.labels(channel).inc(len(decision.groups))
            self.tokens.labels(channel).inc(decision.trainable_tokens)
        elif isinstance(decision, Refused):
            self.refused_groups.labels(channel, decision.reason).inc(decision.whole_group)
            members = self.refused_members.labels(channel, decision.reason)
            members.inc(len(decision.trajectory_ids))
        elif isinstance(decision, Late):
            self.late.labels(channel).inc()

"""Prometheus metrics of admission's decisions."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from schemas.records import Late, ReadyBatch, Refused
from stream_jobs.admit.decisions.journal import JournalRecord


class DecisionMetrics:
    """All metrics, with the prefix clawstream_admit_; they count from the start of the process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(
                f"clawstream_admit_{name}", text, ("channel", *labels), registry=self.registry
            )

        self.batches = counter("batches", "Ready batches")
        self.groups = counter("groups", "Groups in ready batches")
        self.tokens = counter("tokens", "Trainable tokens in ready batches")
        self.refused = counter(
            "refused", "Refused groups, and refused members of groups that go on", "reason"
        )
        self.late = counter("late", "Revisions that came after their trajectory was decided")

    def count(self, channel: str, decision: JournalRecord) -> None:
        """Count one decision that is in the journal."""
        if isinstance(decision, ReadyBatch):
            self.batches.labels(channel).inc()
            self.groups.labels(channel).inc(len(decision.groups))
            self.tokens.labels(channel).inc(decision.trainable_tokens)
        elif isinstance(decision, Refused):
            self.refused.labels(channel, decision.reason).inc()
        elif isinstance(decision, Late):
            self.late.labels(channel).inc()

"""Batches that are not full yet: groups that are ready, in the order in which they became so. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.events import AdmissionPolicy, Channel
from stream_jobs.group import Group, GroupKey, Verdict

NO_VERSION = -1
"""Key of the batch of channel val whose members name no version of the run."""


@dataclass(slots=True)
class OpenBatch:
    """One of them. tokens: trainable ones of all its groups."""

    groups: dict[GroupKey, Group] = field(default_factory=dict)
    tokens: int = 0


class OpenBatches:
    """One batch is open for channel train; for channel val one for each sync index, since a batch of it holds a single one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: dict[int, OpenBatch] = {}

    def put(self, group: Group, verdict: Verdict, log_time: int) -> bool:
        """Take a group that is ready; a new revision of one keeps its place. Returns whether it is new in its batch."""
        oldest = verdict.oldest_sync_index if self._channel == "val" else 0
        key = NO_VERSION if oldest is None else oldest
        if group.verdict is not None and group.batch == key:
            self._open[key].tokens += verdict.tokens - group.verdict.tokens
            group.verdict = verdict
            return False
        self.remove(group)
        batch = self._open.setdefault(key, OpenBatch())
        batch.groups[group.key] = group
        batch.tokens += verdict.tokens
        group.verdict, group.batch, group.entered_at = verdict, key, log_time
        return True

    def remove(self, group: Group) -> None:
        """The group is decided, or waits again. No effect on one that is in no batch."""
        if group.batch is None or group.verdict is None:
            return
        batch = self._open[group.batch]
        del batch.groups[group.key]
        batch.tokens -= group.verdict.tokens
        if not batch.groups:
            del self._open[group.batch]
        group.batch = None

    def open(self) -> list[int]:
        """Keys of the open batches, ascending."""
        return sorted(self._open)

    def full(self, key: int, policy: AdmissionPolicy, all_of_it: bool) -> list[Group]:
        """The groups of the next batch, if there are enough; with `all_of_it` any number of them is enough."""
        batch = self._open.get(key)
        if batch is None:
            return []
        most, most_tokens = policy.val_groups, None
        if self._channel == "train":
            most, most_tokens = policy.batch_groups, policy.batch_tokens
        if not all_of_it and len(batch.groups) < most and (most_tokens is None or batch.tokens < most_tokens):
            return []
        chosen, tokens = [], 0
        for group in batch.groups.values():
            chosen.append(group)
            tokens += group.verdict.tokens if group.verdict is not None else 0
            if len(chosen) >= most or (most_tokens is not None and tokens >= most_tokens):
                return chosen
        return chosen if all_of_it else []

    def overdue(self, key: int, policy: AdmissionPolicy, now: int) -> bool:
        """Whether a batch of channel val has waited long enough for more groups. now: event time."""
        batch = self._open.get(key)
        return batch is not None and next(iter(batch.groups.values())).entered_at + policy.val_deadline_ms <= now

    def waiting(self) -> Iterator[Group]:
        """Every group in an open batch."""
        for batch in self._open.values():
            yield from batch.groups.values()

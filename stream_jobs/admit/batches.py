"""Collect ready groups into batches, in the order in which they became ready. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from clawstream.schemas.records import AdmissionPolicy, Channel
from clawstream.schemas.topics import MAX_RECORD_BYTES
from clawstream.stream_jobs.admit.group import Group, GroupKey, Verdict

NO_VERSION = -1
"""Key of the val batch whose members name no version of the run."""


@dataclass(slots=True)
class OpenBatch:
    """One open batch. tokens: trainable tokens of its groups; size: upper bound of its bytes."""

    groups: dict[GroupKey, Group] = field(default_factory=dict)
    tokens: int = 0
    size: int = 0


class OpenBatches:
    """The open batches of one channel.

    Channel train has one; channel val has one for each sync index, because a batch of it has only
    one.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: dict[int, OpenBatch] = {}

    def put(self, group: Group, verdict: Verdict, log_time: int) -> bool:
        """Add a ready group, or update it in place; return whether it is new in its batch."""
        oldest = verdict.oldest_sync_index if self._channel == "val" else 0
        key = NO_VERSION if oldest is None else oldest
        is_new = group.batch != key
        if is_new:
            self.remove(group)
            self._open.setdefault(key, OpenBatch()).groups[group.key] = group
            group.batch, group.entered_at = key, log_time
        group.verdict = verdict
        self._count(self._open[key], group, verdict.tokens, group.size_with(verdict))
        return is_new

    def remove(self, group: Group) -> None:
        """Remove a group from its batch, if it is in one."""
        if group.batch is None:
            return
        batch = self._open[group.batch]
        self._count(batch, group, 0, 0)
        del batch.groups[group.key]
        if not batch.groups:
            del self._open[group.batch]
        group.batch = None

    @staticmethod
    def _count(batch: OpenBatch, group: Group, tokens: int, size: int) -> None:
        """Replace the group's counted tokens and bytes. Its verdict may have changed since."""
        batch.tokens += tokens - group.tokens
        batch.size += size - group.size
        group.tokens, group.size = tokens, size

    def open(self) -> list[int]:
        """Return the keys of the open batches, ascending."""
        return sorted(self._open)

    def full(self, key: int, policy: AdmissionPolicy, all_of_it: bool) -> list[Group]:
        """Return the groups of the next batch, if there are enough; with `all_of_it` any number.

        A batch closes before it exceeds MAX_RECORD_BYTES, whatever the policy; a larger group goes
        alone.
        """
        batch = self._open.get(key)
        if batch is None:
            return []
        most, most_tokens = policy.val_groups, None
        if self._channel == "train":
            most, most_tokens = policy.batch_groups, policy.batch_tokens
        enough = len(batch.groups) >= most or (
            most_tokens is not None and batch.tokens >= most_tokens
        )
        if not (all_of_it or enough or batch.size > MAX_RECORD_BYTES):
            return []
        chosen, tokens, size = list[Group](), 0, 0
        for group in batch.groups.values():
            size += group.size
            if chosen and size > MAX_RECORD_BYTES:
                return chosen
            chosen.append(group)
            tokens += group.tokens
            if len(chosen) >= most or (most_tokens is not None and tokens >= most_tokens):
                return chosen
        return chosen if all_of_it or size > MAX_RECORD_BYTES else []

    def overdue(self, key: int, policy: AdmissionPolicy, now: int) -> bool:
        """Return whether a val batch has waited long enough for more groups.

        now: event time, ms.
        """
        batch = self._open.get(key)
        return (
            batch is not None
            and next(iter(batch.groups.values())).entered_at + policy.val_deadline_ms <= now
        )

    def waiting(self) -> Iterator[Group]:
        """Yield every group in an open batch."""
        for batch in self._open.values():
            yield from batch.groups.values()

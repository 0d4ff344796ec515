"""Records of `claw.budgets` and `claw.runs`: summaries of runs for those who do not follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.schemas.records.parts import Channel, Int32, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRefusal:
    """A refusal that asks for replacements."""

    offset: int
    """Its offset on the ready batches."""
    group_id: str
    """Group."""
    round: Int32 | None = None
    """Round of the group id."""
    n: Int32
    """Trajectories asked for in replacement."""
    reason: str
    """As in Refused."""
    detail: str | None = None
    """As in Refused, the first 300 characters."""
    total: int
    """`replacements_total` up to and including this refusal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBudget:
    """What admission has decided so far, for rollouts that poll.

    The newest of a key counts; totals count from the start of the journal. Key: run.channel.
    """

    run_id: RunId
    channel: Channel
    journal_id: str
    """Topic id of the ready batches. Offsets and totals restart with another id."""
    read_to: int
    """Next offset of the ready batches: everything below is counted."""
    policy_version: Int32 | None = None
    """Policy in force; null before the first."""
    max_staleness: Int32 | None = None
    """Of the policy: versions between a batch and its oldest token at most; null: no limit, or no
    policy.
    """
    sync_every: Int32 | None = None
    """Of the policy: batches that make one version; null before the first policy."""
    batch_groups: Int32 | None = None
    """Of the policy: groups of a full batch of this channel; null before the first policy."""
    next_batch_seq: int
    """Number of the next batch."""
    groups_admitted: int
    """Groups in batches."""
    groups_refused: int
    """Groups that were refused whole."""
    replacements: Mapping[str, int]
    """Trajectories asked for in replacement, by reason of the refusal."""
    replacements_total: int
    """Sum of `replacements`."""
    refusals: tuple[BudgetRefusal, ...]
    """The newest refusals that ask for replacements, at most 256, oldest first."""
    dropped: int | None = None
    """Offset of the newest such refusal that is no longer listed; null when all are."""
    ended: bool
    """The run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedRun:
    """Offsets of one run."""

    run_id: str
    """Run."""
    first: int
    """Offset of its first record."""
    last: int
    """Offset of its last record."""
    policies: tuple[int, ...]
    """Offsets of its policies, ascending; also of records with an unknown schema."""
    ended: int | None = None
    """Offset of its end; null when it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIndex:
    """Where the runs of one partition of `claw.candidates` are.

    It follows from the log up to `read_to`. The newest of a key counts. Key: number of the
    partition.
    """

    topic_id: str
    """Id of `claw.candidates`: offsets are valid only for this id."""
    partition: Int32
    """Partition of `claw.candidates`."""
    read_to: int
    """Next offset: everything below is in the index."""
    runs: tuple[IndexedRun, ...]
    """All runs that have a record in the partition."""
    unattributed: tuple[int, ...]
    """Offsets of records that are neither of a run nor ticks, ascending, at most 1,000."""
    unlisted: int | None = None
    """Offset of the first such record that is not listed; null when all are."""

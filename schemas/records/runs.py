"""Records of `claw.budgets` and `claw.runs`: summaries of runs for those who do not follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.schemas.records.parts import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRefusal:
    """A refusal that asks for replacements."""

    offset: int
    group_id: str
    round: int | None = None
    n: int
    reason: str
    detail: str | None = None
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBudget:
    """What admission has decided so far, for rollouts that poll. Key: run.channel."""

    run_id: str
    channel: Channel
    journal_id: str
    read_to: int
    policy_version: int | None = None
    max_staleness: int | None = None
    sync_every: int | None = None
    batch_groups: int | None = None
    next_batch_seq: int
    groups_admitted: int
    groups_refused: int
    replacements: Mapping[str, int]
    replacements_total: int
    refusals: tuple[BudgetRefusal, ...]
    dropped: int | None = None
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedRun:
    """Offsets of one run."""

    run_id: str
    first: int
    last: int
    policies: tuple[int, ...]
    ended: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIndex:
    """Where the runs of one partition of the candidates are. Key: number of the partition."""

    topic_id: str
    partition: int
    read_to: int
    runs: tuple[IndexedRun, ...]
    unattributed: tuple[int, ...]
    unlisted: int | None = None

"""The rollout budget of a run as the gateway serves it. Pure.

Admission publishes what it has decided (`RolloutBudget`); `claw.weights` gives the progress of
training. Neither lists groups that have begun but are not yet decided: the client that begins
groups must count them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from clawstream.schemas.records import BudgetRefusal, Channel, RolloutBudget


@dataclass(frozen=True, slots=True)
class BudgetReading:
    """A budget as last read.

    newest_sync_index: Of the newest version of the surviving chain, which is the last version of
    the run on the log; None before the first. age_s: Seconds since the budgets were last read to
    their end. last_version: Sync index at which training ends; None: it goes on.
    """

    budget: RolloutBudget
    newest_sync_index: int | None
    age_s: float
    last_version: int | None = None

    @property
    def ended(self) -> bool:
        """Whether no more groups are of use: the run, or on channel train its training, has ended.

        Rollouts of channel val may still measure the last version.
        """
        last, newest = self.last_version, self.newest_sync_index
        trained = last is not None and newest is not None and newest >= last
        return self.budget.ended or (trained and self.budget.channel == "train")

    def refusals_after(self, offset: int | None) -> tuple[tuple[BudgetRefusal, ...], bool]:
        """Return the listed refusals after an offset, and whether some after it are not listed.

        Args:
            offset: Offset on the journal; None: from the start.
        """
        listed, dropped = self.budget.refusals, self.budget.dropped
        if offset is None:
            return listed, dropped is not None
        missing = dropped is not None and dropped > offset
        return tuple(r for r in listed if r.offset > offset), missing

    def free_capacity(self, loaded: int | None = None) -> int | None:
        """Return how many groups may be undecided at once without a new one being refused as stale.

        The number includes the groups already in progress. Of a group whose oldest token is of
        version v, admission requires

            floor(batch_seq / sync_every) - v <= max_staleness

        So the group must enter a batch below (v + max_staleness + 1) * sync_every, and each batch
        below that takes batch_groups groups. No batch is trained after the last version. The result
        is an upper bound where batches close by tokens.

        Args:
            loaded: Lowest sync index that an engine samples with, if lower than the newest.

        Returns:
            The number of groups. None: unbounded, because no age is too high and training has no
            end. 0 before the first policy or version, and after the end of the run or its training.
        """
        b = self.budget
        if self.ended or b.sync_every is None or b.batch_groups is None:
            return 0
        newest, versions = self.newest_sync_index, self.last_version
        if b.channel == "val" or (b.max_staleness is None and versions is None):
            return None
        if b.max_staleness is not None:
            if newest is None:
                return 0
            usable = (newest if loaded is None else min(loaded, newest)) + b.max_staleness + 1
            versions = usable if versions is None else min(usable, versions)
        assert versions is not None
        return max(0, versions * b.sync_every - b.next_batch_seq) * b.batch_groups

    def validation_due(self, every: int | None, loaded: int | None = None) -> int | None:
        """Return the sync index of the version that the current validation round is for.

        Args:
            every: Versions between two rounds; None: none are asked for.
            loaded: Lowest sync index that an engine samples with, if lower than the newest.

        Returns:
            The highest multiple of `every` that is loaded. None on channel train, before the first
            version, and after the end of the run.
        """
        b, newest = self.budget, self.newest_sync_index
        if every is None or newest is None or b.channel != "val" or b.ended:
            return None
        return (newest if loaded is None else min(loaded, newest)) // every * every


class BudgetSource(Protocol):
    """Read the budget of a run and channel."""

    async def get(self, run_id: str, channel: Channel) -> BudgetReading | None:
        """Return the budget; None when admission has published none.

        Raises:
            BudgetUnknown: The budgets cannot be read now.
        """
        ...

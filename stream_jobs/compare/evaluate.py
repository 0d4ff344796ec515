"""Evaluate the functions of a run that compare the members of a group."""

from __future__ import annotations

from collections.abc import Callable

from clawstream.rewards.results import group_rules_of, rewards_of_group
from clawstream.runtime.blob_store import BlobMissing, BlobStore
from clawstream.runtime.functions.pool import FunctionPool
from clawstream.schemas.records import Reward, Trajectory
from clawstream.schemas.rule_spec import of_run
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.compare.fold import ClosedGroup, Member, RewardName
from clawstream.stream_jobs.worker.blob_fields import resolve_blobs

Read = Callable[[Member], Trajectory | str]
"""Returns the trajectory of a member, or the reason why it is gone."""


class GroupEvaluator:
    """The comparing functions of all runs, and the blobs that they need.

    They run in child processes.
    """

    def __init__(self, settings: Settings) -> None:
        """Make the functions. Raises SettingsError for one that cannot be made."""
        self.pool = FunctionPool(settings.functions)
        try:
            self._rules = group_rules_of(settings, self.pool.find)
        except BaseException:  # interrupted too: else the child processes would stay
            self.pool.stop()
            raise
        self._blobs = BlobStore(settings.blob_uri, settings.gateway.blob_options)

    def close(self) -> None:
        """Stop the child processes at once; a pending call gets PoolStopped."""
        self.pool.stop()

    def names(self, run_id: str) -> frozenset[RewardName]:
        """Return the rewards that comparisons give the trajectories of a run."""
        rules = of_run(self._rules, run_id)
        return frozenset((rule.source, rule.name, rule.version) for rule in rules)

    def evaluate(self, group: ClosedGroup, read: Read, created_at: int) -> list[Reward]:
        """Return the rewards of the members of a group.

        Args:
            group: One or more members.
            read: Reads the payload of a member.
            created_at: Microseconds, informational.

        Raises:
            BlobStoreAway: The blob store cannot be reached.
            Unavailable: From `read`.
        """
        reasons = [exclusion(member, group) for member in group.members]
        found = [
            (member.candidate, reason or self._whole(member, read))
            for member, reason in zip(group.members, reasons, strict=True)
        ]
        rules = of_run(self._rules, group.members[0].candidate.run_id)
        return [r for rule in rules for r in rewards_of_group(found, rule, created_at)]

    def _whole(self, member: Member, read: Read) -> Trajectory | str:
        """Return the complete trajectory of a member, or the reason why it is gone."""
        trajectory = read(member)
        if isinstance(trajectory, str):
            return trajectory
        try:
            return resolve_blobs(trajectory, self._blobs.get)
        except BlobMissing as e:
            return str(e)


def exclusion(member: Member, group: ClosedGroup) -> str | None:
    """Return the reason why a member is not compared; None if its payload is needed.

    Args:
        member: One of the group.
        group: With all of its members.
    """
    candidate = member.candidate
    if candidate.outcome == "replaced":
        return "replaced: another trajectory takes its place in the group"
    if candidate.outcome == "lost" or member.place is None:
        return f"trajectory lost: {candidate.reason or 'no payload'}"
    if len(group.members) == 1:
        return f"no opponent: 1 of {group.size} members of its group came in time"
    return None

"""Evaluate the reward functions and quality rules of a run for a closed trajectory."""

from __future__ import annotations

from clawstream.rewards.results import no_reward, rewards_of, rules_of
from clawstream.runtime.blob_store import BlobMissing, BlobStore
from clawstream.runtime.functions.pool import FunctionPool
from clawstream.schemas.records import Assessment, Reward, Trajectory
from clawstream.schemas.rule_spec import of_run
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.reward.assessments import assessment_of, not_assessed, quality_rules_of
from clawstream.stream_jobs.worker.blob_fields import resolve_blobs


class RuleEvaluator:
    """The functions of all runs, and the blobs that they need.

    Built-in functions run in this process: they are pure and linear in their input. Users'
    functions and reward models run in child processes.
    """

    def __init__(self, settings: Settings) -> None:
        """Load the functions. Raises SettingsError for an unknown name."""
        self.pool = FunctionPool(settings.functions)
        try:
            self._rewards = rules_of(settings, self.pool.find)
            self._quality = quality_rules_of(settings.jobs.quality_functions, self.pool.find)
        except BaseException:  # interrupted too: else the child processes would stay
            self.pool.stop()
            raise
        self._jobs = settings.jobs
        self._blobs = BlobStore(settings.blob_uri, settings.gateway.blob_options)

    def close(self) -> None:
        """Stop the child processes at once; a pending call gets PoolStopped."""
        self.pool.stop()

    def uses_child_processes(self, run_id: str) -> bool:
        """Return whether the run has users' functions or reward models, which may take long."""
        return self._jobs.child_functions(run_id) > 0

    def has_reward_functions(self, run_id: str) -> bool:
        """Return whether a run has reward functions."""
        return bool(of_run(self._rewards, run_id))

    def has_quality_rules(self, run_id: str) -> bool:
        """Return whether a run has quality rules."""
        return bool(of_run(self._quality, run_id))

    def evaluate(
        self, trajectory: Trajectory, created_at: int, as_of: str | None = None
    ) -> list[Reward | Assessment]:
        """Return the assessment of a trajectory, then its rewards.

        Args:
            created_at: Microseconds, informational.
            as_of: The run whose functions apply; default: the trajectory's run.

        Raises:
            BlobStoreAway: The blob store cannot be reached.
        """
        run = as_of or trajectory.run_id
        rules, quality = of_run(self._rewards, run), of_run(self._quality, run)
        if not rules and not quality:
            return []
        try:
            whole = resolve_blobs(trajectory, self._blobs.get)
        except BlobMissing as e:
            missing = [no_reward(trajectory, rule, created_at, str(e)) for rule in rules]
            return [
                *([not_assessed(trajectory, quality, created_at, str(e))] if quality else []),
                *missing,
            ]
        assessed = [assessment_of(whole, quality, created_at)] if quality else []
        return [*assessed, *(r for rule in rules for r in rewards_of(whole, rule, created_at))]

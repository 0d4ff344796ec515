"""Train batches into the policy and publish versions: the state of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from runtime.logs import logger
from schemas.errors import SettingsError
from schemas.ids import Version, parse_version
from schemas.records import WeightVersion
from schemas.settings import Settings, TrainerSettings
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.losses import LOSSES
from trainer.data.batches import FetchedBatch
from trainer.data.sequences import TrainingSequence, sequences_of_batch, within_vocabulary
from trainer.memory import explain_out_of_memory
from trainer.metrics import BatchStats, version_metrics
from trainer.model.policy import Policy, staleness
from trainer.position import Position
from trainer.unfinished_batches import UnfinishedBatches
from trainer.versions.atomic_directory import prune, sweep
from trainer.versions.checkpoint import VersionState, load, newest, save
from trainer.versions.history import deletable, next_attempt, next_sync_index
from trainer.versions.publish import export, manifest
from trainer.versions.weight_log import WeightLog


class Run:
    """Trains batches into the policy and publishes versions of it.

    current_version: The newest published version; None before the first. unpublished: Statistics of
    the
    batches trained since then.
    """

    def __init__(
        self,
        settings: Settings,
        weight_log: WeightLog,
        policy: Policy,
        versions: list[WeightVersion],
        attempt: int,
        current_version: VersionState | None,
        position: Position,
    ) -> None:
        """versions: of this run, in log order. position: where the next batch is read."""
        self.current_version = current_version
        self.position = position
        self.unpublished: list[BatchStats] = []
        self._settings, self._weight_log, self._policy = settings, weight_log, policy
        self._versions, self._attempt = versions, attempt
        self._unpublished_from = position
        self._unfinished = UnfinishedBatches(
            settings.checkpoint_dir / settings.run_id, position.topic_id
        )

    @property
    def sync_index(self) -> int:
        """Sync index of the version that training starts from."""
        return self.current_version.sync_index if self.current_version else 0

    @property
    def finished(self) -> bool:
        limit = self._settings.trainer.max_versions
        return limit is not None and self.sync_index >= limit

    @property
    def version_due(self) -> bool:
        return (
            bool(self.unpublished)
            and self.position.next_batch_seq % self._settings.trainer.sync_every == 0
        )

    @property
    def lr(self) -> float:
        return learning_rate(self._settings.trainer, self._next_sync_index() - 1)

    def train(self, fetched: FetchedBatch) -> None:
        """Train one batch and advance the position in memory; the next version stores it.

        Raises:
            OutOfMemory: The batch needs more memory than available.
            BatchNeverEnds: Training of the batch was killed or out of memory several times.
        """
        batch = fetched.batch
        with (
            self._unfinished.training(batch.batch_seq),
            explain_out_of_memory(batch, self._settings.trainer),
        ):
            self._train(fetched)
        self.position = fetched.position

    def _train(self, fetched: FetchedBatch) -> None:
        batch, s = fetched.batch, self._settings.trainer
        estimate = ADVANTAGES[batch.algorithm]
        data = sequences_of_batch(
            batch, fetched.trajectories, lambda rewards: estimate(rewards, s.advantage_std_offset)
        )
        if data.unrewarded:
            logger().warning(
                "members_not_trained", batch_seq=batch.batch_seq, trajectories=data.unrewarded[:20]
            )
        sequences, outside = within_vocabulary(data.sequences, self._policy.vocabulary)
        if outside:
            logger().error(
                "tokens_outside_vocabulary",
                batch_seq=batch.batch_seq,
                vocabulary=self._policy.vocabulary,
                sequences=len(data.sequences) - len(sequences),
                trajectories=outside[:20],
                action=(
                    "not trained; the engine serves another model than trainer.model_path, or an "
                    "agent submitted such ids"
                ),
            )
        self._check_ids(sequences, batch.batch_seq)
        if data.sampled_at_zero:
            logger().warning(
                "tokens_sampled_at_zero",
                batch_seq=batch.batch_seq,
                tokens=sum(data.sampled_at_zero.values()),
                trajectories=list(data.sampled_at_zero)[:20],
                action="not trained; the engine gave them an infinite log-probability",
            )
        updated = any(stats.update.changed_weights for stats in self.unpublished)
        parent = self.current_version.version_id if self.current_version and not updated else None
        update = self._policy.update(
            sequences, batch.batch_seq, LOSSES[batch.algorithm], self.lr, parent
        )
        for number, step in enumerate(update.steps):
            if step.skipped is not None:
                logger().error(
                    "update_skipped",
                    batch_seq=batch.batch_seq,
                    minibatch=number,
                    reason=step.skipped,
                    trajectories=list(
                        dict.fromkeys(sequence.trajectory_id for sequence in sequences)
                    )[:20],
                    action=(
                        "weights and optimiser stay as before it; look at its log-probabilities, "
                        "lower trainer.lr"
                    ),
                )
        self.unpublished.append(
            BatchStats(
                update=update,
                rewards=data.rewards,
                groups=data.groups,
                sequences=len(sequences),
                tokens=sum(sequence.trained_tokens for sequence in sequences),
                unrewarded=len(data.unrewarded),
                sequences_outside_vocabulary=len(data.sequences) - len(sequences),
                sampled_at_zero=sum(data.sampled_at_zero.values()),
                staleness=staleness(sequences, self._settings.run_id, self.sync_index),
                read_seconds=fetched.read_seconds,
            )
        )

    def publish(self) -> None:
        """Write the checkpoint and weights, then publish the manifest, which makes the version
        count.

        Raises:
            Fenced: A newer trainer took over.
        """
        began = time.perf_counter()
        lr, state = self.lr, self._next_state()
        try:
            checkpoint = save(self._settings.checkpoint_dir, state, self._policy)
            served = self._policy.served_dtypes(self._settings.rollout.dtype)
            files = export(self._settings.weights_dir, state, checkpoint, self._policy, served)
        except OSError:
            # A newer trainer clears away what is unpublished. Then the reason is that it took over,
            # not this error.
            self._weight_log.raise_if_fenced()
            raise
        metrics = version_metrics(self.unpublished, lr, time.perf_counter() - began)
        version = manifest(state, self._unpublished_from.next_batch_seq, files, checkpoint, metrics)
        self._weight_log.publish(version)
        self._versions.append(version)
        self.current_version, self.unpublished, self._unpublished_from = state, [], self.position
        logger().info(
            "version_published",
            version=state.version_id,
            parent=state.parent_version,
            first_batch_seq=version.first_batch_seq,
            last_batch_seq=version.last_batch_seq,
            **{name: round(value, 6) for name, value in metrics.items()},
        )
        self._prune(state)

    def _check_ids(self, sequences: Sequence[TrainingSequence], batch_seq: int) -> None:
        """Refuse tokens of versions that have ids which this trainer gives to its own.

        Raises: SettingsError: `trainer.first_attempt` is too low for recorded data of another
            installation. Fenced: The ids are those of a newer trainer.
        """
        own = {version.version_id for version in self._versions}
        for name in {span.version for sequence in sequences for span in sequence.versions} - own:
            version = parse_version(name)
            if (
                version is None
                or version.run_id != self._settings.run_id
                or version.attempt < self._attempt
            ):
                continue
            self._weight_log.raise_if_fenced()
            raise SettingsError(
                f"setting trainer.first_attempt={self._settings.trainer.first_attempt}: batch "
                f"{batch_seq} has tokens of "
                f"{name}, which is not on this weights log, and versions of attempt "
                f"{self._attempt} are published here; "
                f"set trainer.first_attempt={version.attempt + 1}, or higher, and a run_id without "
                "versions"
            )

    def _next_sync_index(self) -> int:
        if self.current_version is None:
            return 0
        every = self._settings.trainer.sync_every
        return next_sync_index(
            self.current_version.sync_index, self._unpublished_from.next_batch_seq, every
        )

    def _next_state(self) -> VersionState:
        version = Version(self._settings.run_id, self._next_sync_index(), self._attempt)
        return VersionState(
            version_id=str(version),
            run_id=version.run_id,
            sync_index=version.sync_index,
            attempt=version.attempt,
            parent_version=self.current_version.version_id if self.current_version else None,
            weights_topic_id=self._weight_log.topic_id,
            position=self.position,
        )

    def _prune(self, current_version: VersionState) -> None:
        s, run_id = self._settings.trainer, self._settings.run_id
        for root, keep in (
            (self._settings.checkpoint_dir, s.keep_checkpoints),
            (self._settings.weights_dir, s.keep_versions),
        ):
            prune(root, run_id, deletable(self._versions, current_version.version_id, keep))


def learning_rate(settings: TrainerSettings, sync_index: int) -> float:
    """Return the learning rate after the version with sync_index.

    Linear from lr at 0 to lr_final at max_versions.
    """
    if settings.lr_final is None or not settings.max_versions:
        return settings.lr
    return settings.lr + (settings.lr_final - settings.lr) * min(
        1.0, max(sync_index, 0) / settings.max_versions
    )


def open_run(
    settings: Settings,
    weight_log: WeightLog,
    versions: Sequence[WeightVersion],
    taken: Collection[Version],
    locate: Callable[[Position | None], Position],
) -> Run:
    """Resume the run from its newest version, or create it and publish its initial version.

    Deletes what a killed trainer left unpublished.

    Args:
        versions: Versions of the run, in log order.
        taken: All ids of the run on the log.
        locate: Maps a stored position, or None, to the position to read from.

    Raises:
        SettingsError, CheckpointLost: The run cannot be resumed or created.
    """

    def check(info: Mapping[str, Any]) -> None:
        """A killed trainer has read what it trained.

        One beyond the log's end: the log has lost it, and the version with it.
        """
        locate(Position(**info["position"]))

    published = frozenset(taken)
    taken = {*taken}
    for root in (settings.checkpoint_dir, settings.weights_dir):
        deleted, foreign = sweep(root, settings.run_id, published, weight_log.topic_id, check)
        taken |= {*deleted, *foreign}
        if foreign and not versions:
            logger().warning(
                "weights_of_another_log",
                directory=str(root / settings.run_id),
                versions=[str(version) for version in foreign],
                action=(
                    "kept; the weights topic has no version of this run, so it starts anew from "
                    "trainer.model_path"
                ),
            )
    attempt = max(next_attempt(taken), settings.trainer.first_attempt)
    found = newest(settings.checkpoint_dir, versions)
    if found is not None:
        current_version, directory = found
        position = locate(current_version.position)
        policy = load(directory, settings.trainer)
        logger().info(
            "resumed",
            version=current_version.version_id,
            attempt=attempt,
            next_batch_seq=position.next_batch_seq,
        )
        return Run(settings, weight_log, policy, list(versions), attempt, current_version, position)
    if settings.trainer.model_path is None:
        raise SettingsError(
            "setting trainer.model_path: not set, and the run has no version to go on from"
        )
    run = Run(
        settings,
        weight_log,
        Policy(settings.trainer.model_path, settings.trainer),
        [],
        attempt,
        None,
        locate(None),
    )
    run.publish()
    return run

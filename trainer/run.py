"""The run in the trainer's hands: the policy, the version it comes from, and what was trained since."""

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
from trainer.data.batches import Incoming
from trainer.data.sequences import Row, rows_of_batch, within_vocabulary
from trainer.memory import naming_the_batch
from trainer.metrics import BatchStats, version_metrics
from trainer.model.policy import Policy, staleness
from trainer.position import Position
from trainer.unfinished_batches import Begun
from trainer.versions.atomic_directory import prune, sweep
from trainer.versions.checkpoint import State, load, newest, save
from trainer.versions.history import deletable, next_attempt, next_sync_index
from trainer.versions.publish import export, manifest
from trainer.versions.weight_log import Ledger


class Run:
    """Trains batches into the policy and publishes versions of it.

    head: the newest version, None before the first is published. window: the batches trained since head.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        policy: Policy,
        versions: list[WeightVersion],
        attempt: int,
        head: State | None,
        position: Position,
    ) -> None:
        """versions: of this run, in log order. position: where the next batch is read."""
        self.head = head
        self.position = position
        self.window: list[BatchStats] = []
        self._settings, self._ledger, self._policy = settings, ledger, policy
        self._versions, self._attempt = versions, attempt
        self._window_start = position
        self._begun = Begun(settings.checkpoint_dir / settings.run_id, position.topic_id)

    @property
    def sync_index(self) -> int:
        """Of the version that is trained from."""
        return self.head.sync_index if self.head else 0

    @property
    def finished(self) -> bool:
        limit = self._settings.trainer.max_versions
        return limit is not None and self.sync_index >= limit

    @property
    def window_full(self) -> bool:
        return (
            bool(self.window)
            and self.position.next_batch_seq % self._settings.trainer.sync_every == 0
        )

    @property
    def lr(self) -> float:
        return learning_rate(self._settings.trainer, self._next_sync_index() - 1)

    def train(self, incoming: Incoming) -> None:
        """Train one batch. The position moves behind it, in memory: it counts with the next version.

        Raises OutOfMemory, or BatchNeverEnds when that, or a kill, has come of it again and again.
        """
        batch = incoming.batch
        with self._begun.training(batch.batch_seq), naming_the_batch(batch, self._settings.trainer):
            self._train(incoming)
        self.position = incoming.position

    def _train(self, incoming: Incoming) -> None:
        batch, s = incoming.batch, self._settings.trainer
        estimate = ADVANTAGES[batch.algorithm]
        data = rows_of_batch(
            batch, incoming.trajectories, lambda rewards: estimate(rewards, s.advantage_std_offset)
        )
        if data.unrewarded:
            logger().warning(
                "members_not_trained", batch_seq=batch.batch_seq, trajectories=data.unrewarded[:20]
            )
        rows, foreign = within_vocabulary(data.rows, self._policy.vocabulary)
        if foreign:
            logger().error(
                "tokens_not_of_this_model", batch_seq=batch.batch_seq, vocabulary=self._policy.vocabulary,
                rows=len(data.rows) - len(rows), trajectories=foreign[:20],
                action="not trained; the engine serves another model than trainer.model_path, or an agent submitted such ids",
            )  # fmt: skip
        self._check_ids(rows, batch.batch_seq)
        if data.sampled_at_zero:
            logger().warning(
                "tokens_sampled_at_zero", batch_seq=batch.batch_seq, tokens=sum(data.sampled_at_zero.values()),
                trajectories=list(data.sampled_at_zero)[:20],
                action="not trained; the engine gave them an infinite log-probability",
            )  # fmt: skip
        updated = any(stats.update.changed_weights for stats in self.window)
        parent = self.head.version_id if self.head and not updated else None
        update = self._policy.update(
            rows, batch.batch_seq, LOSSES[batch.algorithm], self.lr, parent
        )
        for number, step in enumerate(update.steps):
            if step.skipped is not None:
                logger().error(
                    "update_skipped", batch_seq=batch.batch_seq, minibatch=number, reason=step.skipped,
                    trajectories=list(dict.fromkeys(row.trajectory_id for row in rows))[:20],
                    action="weights and optimiser stay as before it; look at its log-probabilities, lower trainer.lr",
                )  # fmt: skip
        self.window.append(
            BatchStats(
                update=update,
                rewards=data.rewards,
                groups=data.groups,
                rows=len(rows),
                tokens=sum(row.trained_tokens for row in rows),
                unrewarded=len(data.unrewarded),
                foreign_rows=len(data.rows) - len(rows),
                sampled_at_zero=sum(data.sampled_at_zero.values()),
                staleness=staleness(rows, self._settings.run_id, self.sync_index),
                read_seconds=incoming.read_seconds,
            )
        )

    def publish(self) -> None:
        """Checkpoint, weights, manifest: the version counts from the last on. Raises Fenced when a newer trainer took over."""
        began = time.perf_counter()
        lr, state = self.lr, self._next_state()
        try:
            checkpoint = save(self._settings.checkpoint_dir, state, self._policy)
            served = self._policy.served_dtypes(self._settings.rollout.dtype)
            files = export(self._settings.weights_dir, state, checkpoint, self._policy, served)
        except OSError:
            # A newer trainer clears away what is unpublished. Then the reason is that it took over, not this error.
            self._ledger.raise_if_fenced()
            raise
        metrics = version_metrics(self.window, lr, time.perf_counter() - began)
        version = manifest(state, self._window_start.next_batch_seq, files, checkpoint, metrics)
        self._ledger.publish(version)
        self._versions.append(version)
        self.head, self.window, self._window_start = state, [], self.position
        logger().info(
            "version_published",
            version=state.version_id,
            parent=state.parent_version,
            first_batch_seq=version.first_batch_seq,
            last_batch_seq=version.last_batch_seq,
            **{name: round(value, 6) for name, value in metrics.items()},
        )
        self._prune(state)

    def _check_ids(self, rows: Sequence[Row], batch_seq: int) -> None:
        """Refuse tokens of versions that have ids which this trainer gives to its own.

        Raises:
            SettingsError: `trainer.first_attempt` is too low for recorded data of another installation.
            Fenced: The ids are those of a newer trainer.
        """
        own = {version.version_id for version in self._versions}
        for name in {span.version for row in rows for span in row.versions} - own:
            version = parse_version(name)
            if (
                version is None
                or version.run_id != self._settings.run_id
                or version.attempt < self._attempt
            ):
                continue
            self._ledger.raise_if_fenced()
            raise SettingsError(
                f"setting trainer.first_attempt={self._settings.trainer.first_attempt}: batch {batch_seq} has tokens of "
                f"{name}, which is not on this weights log, and versions of attempt {self._attempt} are published here; "
                f"set trainer.first_attempt={version.attempt + 1}, or higher, and a run_id without versions"
            )

    def _next_sync_index(self) -> int:
        if self.head is None:
            return 0
        every = self._settings.trainer.sync_every
        return next_sync_index(self.head.sync_index, self._window_start.next_batch_seq, every)

    def _next_state(self) -> State:
        version = Version(self._settings.run_id, self._next_sync_index(), self._attempt)
        return State(
            version_id=str(version),
            run_id=version.run_id,
            sync_index=version.sync_index,
            attempt=version.attempt,
            parent_version=self.head.version_id if self.head else None,
            weights_topic_id=self._ledger.topic_id,
            position=self.position,
        )

    def _prune(self, head: State) -> None:
        s, run_id = self._settings.trainer, self._settings.run_id
        for root, keep in (
            (self._settings.checkpoint_dir, s.keep_checkpoints),
            (self._settings.weights_dir, s.keep_versions),
        ):
            prune(root, run_id, deletable(self._versions, head.version_id, keep))


def learning_rate(settings: TrainerSettings, sync_index: int) -> float:
    """Of the version that is trained from the one with sync_index: linear from lr at 0 to lr_final at max_versions."""
    if settings.lr_final is None or not settings.max_versions:
        return settings.lr
    return settings.lr + (settings.lr_final - settings.lr) * min(
        1.0, max(sync_index, 0) / settings.max_versions
    )


def open_run(
    settings: Settings,
    ledger: Ledger,
    versions: Sequence[WeightVersion],
    taken: Collection[Version],
    locate: Callable[[Position | None], Position],
) -> Run:
    """The run as its newest version left it, or a new one with its initial version published.

    versions: the run's, in log order. taken: all its ids on the log. locate: a stored position, or None, to where to read.
    Clears away what a killed trainer left unpublished. Raises SettingsError, CheckpointLost, or what `locate` raises.
    """

    def check(info: Mapping[str, Any]) -> None:
        """A killed trainer has read what it trained. One beyond the log's end: the log has lost it, and the version with it."""
        locate(Position(**info["position"]))

    published = frozenset(taken)
    taken = {*taken}
    for root in (settings.checkpoint_dir, settings.weights_dir):
        deleted, foreign = sweep(root, settings.run_id, published, ledger.topic_id, check)
        taken |= {*deleted, *foreign}
        if foreign and not versions:
            logger().warning(
                "weights_of_another_log",
                directory=str(root / settings.run_id),
                versions=[str(version) for version in foreign],
                action="kept; the weights topic has no version of this run, so it starts anew from trainer.model_path",
            )
    attempt = max(next_attempt(taken), settings.trainer.first_attempt)
    found = newest(settings.checkpoint_dir, versions)
    if found is not None:
        head, directory = found
        position = locate(head.position)
        policy = load(directory, settings.trainer)
        logger().info(
            "resumed",
            version=head.version_id,
            attempt=attempt,
            next_batch_seq=position.next_batch_seq,
        )
        return Run(settings, ledger, policy, list(versions), attempt, head, position)
    if settings.trainer.model_path is None:
        raise SettingsError(
            "setting trainer.model_path: not set, and the run has no version to go on from"
        )
    run = Run(
        settings,
        ledger,
        Policy(settings.trainer.model_path, settings.trainer),
        [],
        attempt,
        None,
        locate(None),
    )
    run.publish()
    return run

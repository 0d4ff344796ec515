"""Train batches into the policy and publish versions: the state of one run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from safetensors import SafetensorError

from clawstream.runtime.blob_store import BlobStore
from clawstream.runtime.logs import logger
from clawstream.schemas.ids import Version, parse_version
from clawstream.schemas.records import ReadyBatch, WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.algorithms.registry import LoadedAlgorithm, load_algorithm
from clawstream.trainer.auxiliary_models import AuxiliaryModels
from clawstream.trainer.data.batches import FetchedBatch, ReadImages
from clawstream.trainer.data.environments import by_environment
from clawstream.trainer.data.sequences import (
    BatchSequences,
    TrainingSequence,
    at_temperature,
    sequences_of_batch,
    tokens_by_version,
    trained_indexes,
    trained_lengths,
)
from clawstream.trainer.data.tokenizer_check import check_tokenizer
from clawstream.trainer.data.untrained import (
    BATCH_SKIPPED,
    CRITIC_WARMS_UP,
    NO_MEDIA,
    UPDATE_SKIPPED,
    LeftOut,
    TrajectoryDecision,
    step_decisions,
)
from clawstream.trainer.data.view import batch_view, with_advantages, with_returns
from clawstream.trainer.errors import (
    CheckpointFailed,
    InvalidCheckpoint,
    StorageFailed,
    UntrainableBatch,
)
from clawstream.trainer.learning_rate import learning_rate
from clawstream.trainer.memory import explain_out_of_memory, peak_bytes, reset_peak
from clawstream.trainer.metrics.definitions import headline
from clawstream.trainer.metrics.statistics import (
    BatchStats,
    DataStats,
    UpdateStats,
    staleness,
    version_metrics,
)
from clawstream.trainer.metrics.trend import reward_fall
from clawstream.trainer.metrics.validation import Validation
from clawstream.trainer.model.measurement import FirstPasses
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.position import Position
from clawstream.trainer.step import update
from clawstream.trainer.versions.checkpoint import MODEL, CheckpointWriter
from clawstream.trainer.versions.directory import (
    VersionState,
    prune,
    versions_in,
)
from clawstream.trainer.versions.history import (
    ancestors,
    deletable,
    deletable_checkpoints,
    next_sync_index,
)
from clawstream.trainer.versions.publish import Publisher, manifest
from clawstream.trainer.versions.trained_tokens import TrainedStep, is_recorded, trained_steps
from clawstream.trainer.versions.weight_log import Trained, WeightLog
from clawstream.trainer.vision.reader import ImageReader

FILES_S = 1800.0
"""Reading a checkpoint, or writing one or a version, may take this long at least."""
BATCH_S = 600.0
"""The same for publishing, and for the work on a batch between two passes: it may load a reference
model or a critic.
"""


class _EstimatedPart(NamedTuple):
    """One environment of a batch, ready for the update."""

    sequences: tuple[TrainingSequence, ...]
    data: DataStats
    left_out: LeftOut


class Run:
    """Trains batches into the policy and publishes versions of it.

    Attributes:
        current_version: the newest published version; None before the first.
        position: after the last trained batch. The next version stores it.
        unpublished: statistics of the batches trained since the current version.
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
        auxiliary: AuxiliaryModels,
    ) -> None:
        """versions: of this run, in log order."""
        self.current_version = current_version
        self.position = position
        self.unpublished: list[BatchStats] = []
        self._trained: list[TrainedStep] = []
        self._decided: list[TrajectoryDecision] = []
        self._idle_since = time.perf_counter()
        self._settings, self._weight_log, self._policy = settings, weight_log, policy
        self._versions, self._attempt = versions, attempt
        self._leads, self._watchdog = policy.processes.leads, policy.processes.watchdog
        group = policy.processes.background_group()
        self._checkpoints = CheckpointWriter(
            settings.checkpoint_dir, settings.checkpoint_uri, current_version, group
        )
        self._publisher = Publisher(settings, policy)
        self._auxiliary = auxiliary
        self._validations: dict[int, Mapping[str, float]] = {}

    @property
    def read_images(self) -> ReadImages | None:
        """What reads the images that the policy takes; None if it takes none."""
        images, s = self._policy.images, self._settings
        if images is None:
            return None
        store = BlobStore(s.blob_uri, s.gateway.blob_options)
        return ImageReader(store, self._policy.readable, images.misfit).read

    @property
    def versions(self) -> Sequence[WeightVersion]:
        """All versions of the run in log order, with the validation known so far."""
        known = self._validations
        return [
            replace(v, metrics={**v.metrics, **known.get(v.sync_index, {})}) for v in self._versions
        ]

    @property
    def sync_index(self) -> int:
        """Sync index of the version that training starts from."""
        return self.current_version.version.sync_index if self.current_version else 0

    @property
    def finished(self) -> bool:
        limit = self._settings.trainer.max_versions
        return limit is not None and self.sync_index >= limit

    @property
    def version_due(self) -> bool:
        every = self._settings.admit.policy.sync_every
        return bool(self.unpublished) and self.position.next_batch_seq % every == 0

    def validated(self, validation: Validation) -> None:
        """Add a validation to the metrics of its versions, by which the best one is kept."""
        self._validations[validation.sync_index] = validation.metrics

    def train(self, fetched: FetchedBatch) -> None:
        """Train one batch and advance the position.

        Raises:
            OutOfMemory: The batch needs more memory than available.
            ProcessLost: Another process of this trainer ended.
        """
        batch, waited = fetched.batch, time.perf_counter() - self._idle_since
        reset_peak(self._policy.device)
        with (
            self._watchdog.work("batch", BATCH_S),
            explain_out_of_memory(batch, self._settings.trainer),
            self._policy.processes.joined(),
        ):
            self._train(fetched)
        self.unpublished[-1] = replace(
            self.unpublished[-1],
            wait_seconds=waited,
            device_bytes=peak_bytes(self._policy.device),
        )
        self.position = fetched.position
        self._idle_since = time.perf_counter()

    def _train(self, fetched: FetchedBatch) -> None:
        batch, s = fetched.batch, self._settings
        algorithm = load_algorithm(s, batch.algorithm)
        check_tokenizer(
            fetched.trajectories.values(), self._policy.tokenizer_fingerprint, batch.batch_seq
        )
        split = by_environment(batch, fetched.trajectories, s.trainer.environments)
        try:
            parts = [
                self._estimated(part, fetched, environment, algorithm)
                for environment, part in split.items()
            ]
        except UntrainableBatch as e:
            self._skip(fetched, str(e))
            return
        sequences = [sequence for part in parts for sequence in part.sequences]
        critic = self._auxiliary.train_critic(sequences, batch.batch_seq)
        stats, trained = self._train_policy(sequences, algorithm, fetched)
        self._decide(fetched, parts, {id(sequence.tokens) for sequence in trained})
        for number, step in enumerate(stats.steps):
            if step.skipped is not None:
                logger().error(
                    "update_skipped",
                    batch_seq=batch.batch_seq,
                    minibatch=number,
                    reason=step.skipped,
                    trajectories=_trajectories(sequences),
                    action="weights and optimiser stay as before it; look at its log-probabilities,"
                    " lower trainer.lr",
                )
        self.unpublished.append(
            BatchStats(
                update=stats,
                data=tuple(part.data for part in parts),
                critic=critic,
                read_seconds=fetched.read_seconds,
            )
        )

    def _skip(self, fetched: FetchedBatch, why: str) -> None:
        """Train nothing on a batch; its version has the weights before. A dead letter names it."""
        self._weight_log.dead_letter(fetched.record, fetched.position.topic_id, "untrainable", why)
        self._keep_decisions(
            fetched,
            {
                name: dict.fromkeys((step.index for step in trajectory.steps), BATCH_SKIPPED)
                for name, trajectory in fetched.trajectories.items()
            },
        )
        nothing = UpdateStats(steps=(), seconds=0.0, peak_flops=None)
        self.unpublished.append(
            BatchStats(update=nothing, data=(), read_seconds=fetched.read_seconds)
        )

    def _estimated(
        self,
        batch: ReadyBatch,
        fetched: FetchedBatch,
        environment: str | None,
        algorithm: LoadedAlgorithm,
    ) -> _EstimatedPart:
        """Return the sequences of an environment with advantages, and returns for the critic.

        Args:
            batch: the groups of the environment.
            fetched: the whole batch.
            environment: a name in `trainer.environments`; None: all others.
            algorithm: of the batch.

        Raises:
            UntrainableBatch: what was recorded cannot be calculated with.
        """
        with _calculation(batch.batch_seq):
            data = sequences_of_batch(
                batch,
                fetched.trajectories,
                algorithm.smallest_group,
                algorithm.rewards,
                self._policy.readable,
                environment,
                fetched.images,
            )
        self._log_left_out(batch.batch_seq, data, fetched.images.unusable)
        versions = tokens_by_version(data.sequences)
        self._check_ids(versions.keys(), batch.batch_seq)
        sequences = data.sequences
        if algorithm.temperature is not None:
            sequences = tuple(at_temperature(s, algorithm.temperature) for s in sequences)
        sequences = self._auxiliary.score(sequences, algorithm.needs, self.sync_index)
        # An error of a user's own estimator ends the trainer: its author has to know of it.
        with nullcontext() if algorithm.own_advantage else _calculation(batch.batch_seq):
            view = batch_view(sequences, data.members, self._settings.run_id, self.sync_index)
            sequences = with_advantages(sequences, algorithm.advantage(view, algorithm.settings))
            if algorithm.returns is not None:
                sequences = with_returns(sequences, algorithm.returns(view, algorithm.settings))
        stats = DataStats(
            environment=environment,
            rewards=data.rewards,
            groups=data.groups,
            members=len(data.members),
            sequences=len(sequences),
            tokens=sum(sequence.trained_tokens for sequence in sequences),
            lengths=trained_lengths(sequences),
            turns=sum(len(member.steps) for member in data.members),
            unrewarded=len(data.unrewarded),
            outside_vocabulary=sum(data.outside_vocabulary.values()),
            with_media=sum(data.with_media.values()),
            sampled_at_zero=sum(data.sampled_at_zero.values()),
            staleness=staleness(versions, self._settings.run_id, self.sync_index),
        )
        return _EstimatedPart(sequences, stats, data.left_out)

    def _train_policy(
        self,
        sequences: Sequence[TrainingSequence],
        algorithm: LoadedAlgorithm,
        fetched: FetchedBatch,
    ) -> tuple[UpdateStats, Sequence[TrainingSequence]]:
        """Train the policy, and keep what it saw of the tokens for the next version.

        While the critic warms up, it trains on the sequences that need none.

        Returns:
            What was measured, and the sequences that it was trained on.
        """
        if self._auxiliary.critic_warms_up(self.sync_index):
            sequences = [sequence for sequence in sequences if sequence.returns is None]
        if not sequences:
            return UpdateStats(steps=(), seconds=0.0, peak_flops=None), ()
        updates = sum(stats.update.updates for stats in self.unpublished)
        version = self.current_version
        parent = str(version.version) if version is not None and not updates else None
        share, batch_seq = self._settings.trainer.record_tokens, fetched.batch.batch_seq
        recorded = [s for s in sequences if is_recorded(s.trajectory_id, share)]
        passes = FirstPasses(recorded, updates)
        stats = update(self._policy, sequences, batch_seq, algorithm, self._lr, parent, passes)
        found = passes.gathered(self._policy.processes)
        if self._leads:
            self._trained += trained_steps(found, fetched.trajectories, batch_seq)
        return stats, [sequence for sequence in sequences if passes.trained(sequence)]

    def _decide(
        self, fetched: FetchedBatch, parts: Sequence[_EstimatedPart], trained: Set[int]
    ) -> None:
        """Keep what was done with each step for the next version.

        Args:
            trained: `id` of the tokens of each sequence that was trained.
        """
        left_out = {name: dict(steps) for part in parts for name, steps in part.left_out.items()}
        warms_up = self._auxiliary.critic_warms_up(self.sync_index)
        for sequence in (s for part in parts for s in part.sequences):
            if id(sequence.tokens) not in trained:
                waits = warms_up and sequence.returns is not None
                reason = CRITIC_WARMS_UP if waits else UPDATE_SKIPPED
                steps = left_out[sequence.trajectory_id]
                steps |= dict.fromkeys(trained_indexes([sequence]), reason)
        self._keep_decisions(fetched, left_out)

    def _keep_decisions(self, fetched: FetchedBatch, left_out: LeftOut) -> None:
        if self._leads:
            batch_seq = fetched.batch.batch_seq
            self._decided += step_decisions(fetched.trajectories.values(), left_out, batch_seq)

    def _log_left_out(
        self, batch_seq: int, data: BatchSequences, unusable: Mapping[str, str]
    ) -> None:
        """Log what is excluded from training. unusable: trajectory to why its images are."""
        if data.unrewarded:
            logger().warning(
                "members_not_trained", batch_seq=batch_seq, trajectories=data.unrewarded[:20]
            )
        if data.outside_vocabulary:
            logger().error(
                "tokens_outside_vocabulary",
                batch_seq=batch_seq,
                vocabulary=self._policy.readable.vocabulary,
                tokens=sum(data.outside_vocabulary.values()),
                trajectories=list(data.outside_vocabulary)[:20],
                action="not trained from there on; the engine serves another model than "
                "trainer.model_path, or an agent submitted such ids",
            )
        if data.with_media:
            logger().error(
                "media_not_trained",
                batch_seq=batch_seq,
                tokens=sum(data.with_media.values()),
                trajectories=list(data.with_media)[:20],
                reasons=sorted({unusable.get(name, NO_MEDIA) for name in data.with_media})[:5],
                action="not trained from there on (see trainer.md, Images)",
            )
        if data.sampled_at_zero:
            logger().warning(
                "tokens_sampled_at_zero",
                batch_seq=batch_seq,
                tokens=sum(data.sampled_at_zero.values()),
                trajectories=list(data.sampled_at_zero)[:20],
                action="not trained; the engine gave them an infinite log-probability",
            )

    def publish(self) -> None:
        """Write the weights, publish the manifest, which makes the version count, and begin its
        checkpoint if one is due.

        Raises:
            Fenced: A newer trainer took over.
        """
        began = time.perf_counter()
        lr, s, parent = self._lr, self._settings, self.current_version
        state = VersionState(
            version=Version(s.run_id, self._next_sync_index, self._attempt),
            parent_version=str(parent.version) if parent else None,
            weights_topic_id=self._weight_log.topic_id,
            position=self.position,
        )
        with self._file_work():
            self._checkpoints.raise_if_failed()
            exported = self._publisher.export(state)
        metrics = version_metrics(self.unpublished, lr, time.perf_counter() - began)
        metrics |= self._reward_fall(metrics)
        first_batch_seq = parent.position.next_batch_seq if parent else 0
        if parent is None:  # a run that has versions always has a checkpoint
            self._checkpoint(state)
            self._complete_checkpoint()
        newest, base_model = self._checkpoints.newest, self._policy.base_model
        version = manifest(state, first_batch_seq, exported, newest, metrics, base_model)
        trained: list[Trained] = [
            *(one.record(version.version_id) for one in self._decided),
            *(one.record(version.version_id) for one in self._trained),
        ]
        with self._watchdog.work("publish", BATCH_S):
            self._weight_log.publish(version, trained)
        self._versions.append(version)
        self.current_version, self.unpublished = state, []
        self._decided, self._trained = [], []
        logger().info(
            "version_published",
            version=version.version_id,
            parent=version.parent_version,
            first_batch_seq=version.first_batch_seq,
            last_batch_seq=version.last_batch_seq,
            **headline(metrics),
        )
        if parent is not None and state.version.sync_index % s.trainer.save_every == 0:
            self._checkpoint(state)
        self._prune(version.version_id)
        self._idle_since = time.perf_counter()

    def _reward_fall(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metric of a fall of the reward, if there is one; log where it begins."""
        if "reward_mean" not in metrics or self.current_version is None:
            return {}
        before = ancestors(self._versions, str(self.current_version.version))
        rewards = [v.metrics["reward_mean"] for v in before if "reward_mean" in v.metrics]
        fall = reward_fall([*reversed(rewards), metrics["reward_mean"]])
        if fall is None:
            return {}
        if "reward_fall" not in before[0].metrics:
            logger().warning(
                "reward_fell",
                fall=round(fall, 3),
                lr=metrics["lr"],
                kl_sampled=metrics.get("kl_sampled"),
                action="lower trainer.lr, or let it fall by trainer.lr_decay; go back to a better "
                "version; see docs/training-gets-worse.md",
            )
        return {"reward_fall": fall}

    def end(self) -> None:
        """Publish what is unpublished, and wait for a complete checkpoint of the last version.

        Raises:
            Fenced: A newer trainer took over.
        """
        if self.unpublished:
            self.publish()
        self._complete_checkpoint()
        if self.current_version is not None:
            if self._checkpoints.newest != self.current_version:
                self._checkpoint(self.current_version)
                self._complete_checkpoint()
            self._prune(str(self.current_version.version))

    def _checkpoint(self, state: VersionState) -> None:
        """Begin the checkpoint of the current version; wait for the one before."""
        with self._file_work():
            self._checkpoints.start(
                state,
                {**self._policy.state, **self._auxiliary.state},
                {MODEL: self._policy.save_configuration, **self._auxiliary.configurations},
            )

    def _complete_checkpoint(self) -> None:
        """Wait until the checkpoint in progress, if any, is complete."""
        with self._file_work():
            self._checkpoints.wait()

    @contextmanager
    def _file_work(self) -> Iterator[None]:
        """Read or write files, within a time limit.

        Raise Fenced instead of an error if a newer trainer, which deletes them, took over.
        """
        try:
            with self._watchdog.work("files", FILES_S):
                yield
        except (OSError, SafetensorError, CheckpointFailed, InvalidCheckpoint, StorageFailed):
            self._weight_log.raise_if_fenced()
            raise

    def _prune(self, current_version: str) -> None:
        """Delete the files of old versions and checkpoints, or those left at the next call."""
        if not self._leads:
            return
        try:
            with self._watchdog.work("files", FILES_S):
                self._delete_old(current_version)
        except StorageFailed as e:
            self._weight_log.raise_if_fenced()
            logger().warning(
                "versions_not_deleted",
                error=str(e),
                action="none needed: they are deleted after the next version",
            )

    def _delete_old(self, current_version: str) -> None:
        s, t, log = self._settings, self._settings.trainer, self.versions
        places = [(s.weights_uri, deletable, t.keep_versions)]
        places += [(root, deletable_checkpoints, t.keep_checkpoints) for root in s.checkpoint_roots]
        for root, choose, keep in places:
            found = versions_in(root, s.run_id)
            old = choose(log, found.keys(), current_version, keep, t.keep_best_by)
            prune(root, found, old)

    def _check_ids(self, versions: Set[str], batch_seq: int) -> None:
        """Refuse tokens of versions with ids that this trainer gives to its own versions.

        Raises:
            UntrainableBatch: an agent stated such a version, or `trainer.first_attempt` is too low
                for recorded data of another installation.
            Fenced: The ids are those of a newer trainer.
        """
        own = {version.version_id for version in self._versions}
        for name in versions - own:
            version = parse_version(name)
            if (
                version is None
                or version.run_id != self._settings.run_id
                or version.attempt < self._attempt
            ):
                continue
            self._weight_log.raise_if_fenced()
            raise UntrainableBatch(
                f"batch {batch_seq} has tokens of {name}, which is not on this weights log, and "
                f"versions of attempt {self._attempt} are published here: an agent stated it, or "
                f"the data is of another installation; then set trainer.first_attempt="
                f"{version.attempt + 1}, or higher, and a run_id without versions"
            )

    @property
    def _next_sync_index(self) -> int:
        if self.current_version is None:
            return 0
        return next_sync_index(
            self.sync_index,
            self.current_version.position.next_batch_seq,
            self._settings.admit.policy.sync_every,
        )

    @property
    def _lr(self) -> float:
        return learning_rate(self._settings.trainer, self._next_sync_index - 1)


@contextmanager
def _calculation(batch_seq: int) -> Iterator[None]:
    """Raise UntrainableBatch for what a calculation from recorded values raises."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as e:
        trace = "".join(traceback.format_exception(e))
        raise UntrainableBatch(f"batch {batch_seq}: {type(e).__name__}: {e}\n{trace}") from e


def _trajectories(sequences: Sequence[TrainingSequence]) -> list[str]:
    """Return the first trajectories, for a log event."""
    return list(dict.fromkeys(sequence.trajectory_id for sequence in sequences))[:20]

"""Train batches into the policy and publish versions: the state of one run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace

from safetensors import SafetensorError

from clawstream.runtime.blob_store import BlobStore
from clawstream.runtime.logs import logger
from clawstream.schemas.ids import Version, parse_version
from clawstream.schemas.records import ReadyBatch, WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.auxiliary_models import AuxiliaryModels
from clawstream.trainer.data.batches import ReadImages
from clawstream.trainer.data.untrained import (
    TrajectoryDecision,
)
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
    version_metrics,
)
from clawstream.trainer.metrics.trend import reward_fall
from clawstream.trainer.metrics.validation import Validation
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.position import Position
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
from clawstream.trainer.versions.trained_tokens import TrainedStep
from clawstream.trainer.versions.weight_log import Trained, WeightLog
from clawstream.trainer.vision.reader import ImageReader

FILES_S = 1800.0
"""Reading a checkpoint, or writing one or a version, may take this long at least."""
BATCH_S = 600.0
"""The same for publishing, and for the work on a batch between two passes: it may load a reference
model or a critic.
"""


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
        self._idle_since, self._waited_seconds = time.perf_counter(), 0.0
        self.settings, self.weight_log, self.policy = settings, weight_log, policy
        self._versions, self._attempt = versions, attempt
        self._leads, self._watchdog = policy.processes.leads, policy.processes.watchdog
        group = policy.processes.background_group()
        self._checkpoints = CheckpointWriter(
            settings.checkpoint_dir, settings.checkpoint_uri, current_version, group
        )
        self._publisher = Publisher(settings, policy)
        self.auxiliary = auxiliary
        self._validations: dict[int, Mapping[str, float]] = {}

    @property
    def read_images(self) -> ReadImages | None:
        """What reads the images that the policy takes; None if it takes none."""
        images, s = self.policy.images, self.settings
        if images is None:
            return None
        store = BlobStore(s.blob_uri, s.gateway.blob_options)
        return ImageReader(store, self.policy.readable, images.misfit).read

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
    def current_version_id(self) -> str | None:
        return None if self.current_version is None else str(self.current_version.version)

    @property
    def finished(self) -> bool:
        limit = self.settings.trainer.max_versions
        return limit is not None and self.sync_index >= limit

    @property
    def version_due(self) -> bool:
        every = self.settings.admit.policy.sync_every
        return bool(self.unpublished) and self.position.next_batch_seq % every == 0

    def validated(self, validation: Validation) -> None:
        """Add a validation to the metrics of its versions, by which the best one is kept."""
        self._validations[validation.sync_index] = validation.metrics

    @contextmanager
    def training(self, batch: ReadyBatch) -> Iterator[None]:
        """Train a batch within a time limit, and measure its memory and the wait before it.

        Raises:
            OutOfMemory: the batch needs more memory than available.
            ProcessLost: another process of this trainer ended.
        """
        self._waited_seconds = time.perf_counter() - self._idle_since
        reset_peak(self.policy.device)
        with (
            self._watchdog.work("batch", BATCH_S),
            explain_out_of_memory(batch, self.settings.trainer),
            self.policy.processes.joined(),
        ):
            yield

    def batch_trained(
        self,
        stats: BatchStats,
        position: Position,
        trained: Iterable[TrainedStep],
        decisions: Iterable[TrajectoryDecision],
    ) -> None:
        """Advance the position: the next version has this batch.

        Args:
            stats: of the batch.
            position: after it.
            trained: what was seen of its tokens.
            decisions: what was done with each of its steps.
        """
        self.unpublished.append(
            replace(
                stats,
                wait_seconds=self._waited_seconds,
                device_bytes=peak_bytes(self.policy.device),
            )
        )
        if self._leads:
            self._trained += trained
            self._decided += decisions
        self.position = position
        self._idle_since = time.perf_counter()

    def publish(self) -> None:
        """Write the weights, publish the manifest, which makes the version count, and begin its
        checkpoint if one is due.

        Raises:
            Fenced: A newer trainer took over.
        """
        began = time.perf_counter()
        lr, s, parent = self.lr, self.settings, self.current_version
        state = VersionState(
            version=Version(s.run_id, self._next_sync_index, self._attempt),
            parent_version=str(parent.version) if parent else None,
            weights_topic_id=self.weight_log.topic_id,
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
        newest, base_model = self._checkpoints.newest, self.policy.base_model
        version = manifest(state, first_batch_seq, exported, newest, metrics, base_model)
        trained: list[Trained] = [
            *(one.record(version.version_id) for one in self._decided),
            *(one.record(version.version_id) for one in self._trained),
        ]
        with self._watchdog.work("publish", BATCH_S):
            self.weight_log.publish(version, trained)
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
                {**self.policy.state, **self.auxiliary.state},
                {MODEL: self.policy.save_configuration, **self.auxiliary.configurations},
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
            self.weight_log.raise_if_fenced()
            raise

    def _prune(self, current_version: str) -> None:
        """Delete the files of old versions and checkpoints, or those left at the next call."""
        if not self._leads:
            return
        try:
            with self._watchdog.work("files", FILES_S):
                self._delete_old(current_version)
        except StorageFailed as e:
            self.weight_log.raise_if_fenced()
            logger().warning(
                "versions_not_deleted",
                error=str(e),
                action="none needed: they are deleted after the next version",
            )

    def _delete_old(self, current_version: str) -> None:
        s, t, log = self.settings, self.settings.trainer, self.versions
        places = [(s.weights_uri, deletable, t.keep_versions)]
        places += [(root, deletable_checkpoints, t.keep_checkpoints) for root in s.checkpoint_roots]
        for root, choose, keep in places:
            found = versions_in(root, s.run_id)
            old = choose(log, found.keys(), current_version, keep, t.keep_best_by)
            prune(root, found, old)

    def check_ids(self, versions: Set[str], batch_seq: int) -> None:
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
                or version.run_id != self.settings.run_id
                or version.attempt < self._attempt
            ):
                continue
            self.weight_log.raise_if_fenced()
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
            self.settings.admit.policy.sync_every,
        )

    @property
    def lr(self) -> float:
        return learning_rate(self.settings.trainer, self._next_sync_index - 1)

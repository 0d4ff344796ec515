"""Resume a run from its newest checkpoint, or create it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from clawstream.runtime.logs import logger
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import Version
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.auxiliary_models import AuxiliaryModels
from clawstream.trainer.model.lora import check_identity
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.parallel.processes import ONE, Processes
from clawstream.trainer.position import Position
from clawstream.trainer.run import Run
from clawstream.trainer.versions.checkpoint import MODEL, load, newest
from clawstream.trainer.versions.directory import (
    VersionState,
    delete_unpublished,
    read_info,
    upload,
)
from clawstream.trainer.versions.history import next_attempt
from clawstream.trainer.versions.weight_log import WeightLog


@dataclass(frozen=True)
class Start:
    """Where a trainer begins. The leader finds it, and every process uses it.

    Attributes:
        versions: of the run, in log order.
        attempt: of the versions to publish.
        resumed: the version to train on from and the directory of its checkpoint; None: a new run.
        position: to read from.
    """

    versions: tuple[WeightVersion, ...]
    attempt: int
    resumed: tuple[VersionState, Path] | None
    position: Position


def open_run(
    settings: Settings,
    weight_log: WeightLog,
    versions: Sequence[WeightVersion],
    taken: Set[Version],
    locate: Callable[[Position | None], Position],
    processes: Processes = ONE,
) -> Run:
    """Resume the run from its newest checkpoint, or create it and publish its initial version.

    Only the leader of the processes uses `versions`, `taken` and `locate`.

    Args:
        settings: all.
        weight_log: of this process.
        versions: Versions of the run, in log order.
        taken: All ids of the run on the log.
        locate: Maps a stored position, or None, to the position to read from.
        processes: that train the run.

    Raises:
        SettingsError, CheckpointLost: The run cannot be resumed or created.
    """
    start = processes.broadcast(
        find_start(settings, weight_log.topic_id, versions, taken, locate)
        if processes.leads
        else None
    )
    if start.resumed is None:
        policy = Policy(_model_path(settings), settings.trainer, processes=processes)
        auxiliary = AuxiliaryModels(settings.trainer, policy)
        run = Run(settings, weight_log, policy, [], start.attempt, None, start.position, auxiliary)
        run.publish()
        return run
    current_version, directory = start.resumed
    policy, auxiliary = _restored(settings, directory, processes)
    logger().info(
        "resumed",
        version=str(current_version.version),
        attempt=start.attempt,
        next_batch_seq=start.position.next_batch_seq,
        abandoned_version=None
        if start.versions[-1].version_id == str(current_version.version)
        else start.versions[-1].version_id,
    )
    versions = list(start.versions)
    return Run(
        settings,
        weight_log,
        policy,
        versions,
        start.attempt,
        current_version,
        start.position,
        auxiliary,
    )


def _restored(
    settings: Settings, directory: Path, processes: Processes
) -> tuple[Policy, AuxiliaryModels]:
    """Return the models of a checkpoint; an adapter on the model of the settings."""
    t = settings.trainer
    if t.lora.rank is None:
        check_identity(directory / MODEL, t.lora, None)
        policy = Policy(directory / MODEL, t, weights=False, processes=processes)
    else:
        policy = Policy(_model_path(settings), t, processes=processes)
        check_identity(directory / MODEL, t.lora, policy.base_model)
    auxiliary = AuxiliaryModels(t, policy, directory)
    load(directory, {**policy.state, **auxiliary.state}, processes.background_group())
    return policy, auxiliary


def _model_path(settings: Settings) -> Path:
    if settings.trainer.model_path is None:
        raise SettingsError(
            "setting trainer.model_path: not set, and the run has no version to go on from"
        )
    return settings.trainer.model_path


def find_start(
    settings: Settings,
    weights_topic_id: str,
    versions: Sequence[WeightVersion],
    taken: Set[Version],
    locate: Callable[[Position | None], Position],
) -> Start:
    """Find the newest checkpoint, complete its copy, and delete what a killed trainer left
    unpublished.

    Args:
        settings: all.
        weights_topic_id: of the weights log.
        versions: Versions of the run, in log order.
        taken: All ids of the run on the log.
        locate: Maps a stored position, or None, to the position to read from.

    Raises:
        CheckpointLost: The run has versions, but no checkpoint.
        StorageFailed: Versions or checkpoints cannot be read, copied or deleted.
    """
    published = frozenset(taken)
    taken = {*taken}
    for root in (*settings.checkpoint_roots, settings.weights_uri):
        # `locate` fails for a position beyond the end of its topic: a trainer has read what it
        # trained, so the log has lost it, and the version with it.
        deleted, foreign = delete_unpublished(
            root, settings.run_id, published, weights_topic_id, locate
        )
        taken |= {*deleted, *foreign}
        if foreign and not versions:
            logger().warning(
                "weights_of_another_log",
                directory=f"{root}/{settings.run_id}",
                versions=[str(version) for version in foreign],
                action="kept; the weights topic has no version of this run, so it starts from "
                "trainer.model_path",
            )
    found = newest(settings.checkpoint_dir, settings.checkpoint_uri, versions)
    if found is not None and settings.checkpoint_uri is not None:
        upload(found[1], settings.checkpoint_uri, read_info(found[1]))
    return Start(
        versions=tuple(versions),
        attempt=max(next_attempt(taken), settings.trainer.first_attempt),
        resumed=found,
        position=locate(found[0].position if found is not None else None),
    )

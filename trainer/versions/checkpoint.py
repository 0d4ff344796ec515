"""Checkpoints: model, optimiser, random states and the position, in one directory that is there
completely or not at all.

`<checkpoint_dir>/<run>/<sync index>.<attempt>/`: `model/` (Hugging Face layout), `training.pt`,
`clawstream.json` (this state and the sha256 of every file). The sampler has no state of its own:
batch order is the position, shuffles follow from it. A checkpoint counts only once its version is
on the weights log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runtime.logs import logger
from schemas.ids import Version
from schemas.records import WeightVersion
from schemas.settings import TrainerSettings
from trainer.errors import CheckpointLost, InvalidCheckpoint
from trainer.model.policy import Policy
from trainer.position import Position
from trainer.versions.atomic_directory import directory_of, new_directory, verify

MODEL = "model"
TRAINING = "training.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionState:
    """A version as its checkpoint knows it.

    weights_topic_id: the log on which it counts once it is there.
    """

    version_id: str
    run_id: str
    sync_index: int
    attempt: int
    parent_version: str | None
    weights_topic_id: str
    position: Position

    @property
    def version(self) -> Version:
        return Version(self.run_id, self.sync_index, self.attempt)


def save(root: Path, state: VersionState, policy: Policy) -> Path:
    """Write the checkpoint of a version. Returns its directory; OSError leaves none."""
    final = directory_of(root, state.version)
    with new_directory(final, asdict(state)) as tmp:
        policy.save(tmp / MODEL)
        torch.save(policy.training_state(), tmp / TRAINING)
    return final


def read(directory: Path, version_id: str) -> VersionState:
    """The state in a checkpoint whose every file is whole. Raises InvalidCheckpoint."""
    info = verify(directory)
    try:
        position = Position(**info["position"])
        state = VersionState(
            **{**{k: v for k, v in info.items() if k != "files"}, "position": position}
        )
    except (TypeError, KeyError) as e:
        raise InvalidCheckpoint(f"{directory}: not the state of a checkpoint: {e}") from e
    if state.version_id != version_id:
        raise InvalidCheckpoint(
            f"{directory}: is of version {state.version_id}, not of {version_id}"
        )
    return state


def newest(root: Path, versions: Sequence[WeightVersion]) -> tuple[VersionState, Path] | None:
    """VersionState and directory of the newest version (log order) whose checkpoint is whole; None
    when there are no versions.

    Raises CheckpointLost when there are versions, but no checkpoint of them.
    """
    problems = []
    for version in reversed(versions):
        directory = directory_of(root, Version(version.run_id, version.sync_index, version.attempt))
        try:
            return read(directory, version.version_id), directory
        except InvalidCheckpoint as e:
            if directory.exists():  # pruned ones are normal
                problems.append(str(e))
                logger().warning("checkpoint_not_usable", version=version.version_id, error=str(e))
    if not versions:
        return None
    raise CheckpointLost(
        f"run {versions[-1].run_id} has {len(versions)} versions up to {versions[-1].version_id}, "
        f"but {root} has no whole "
        f"checkpoint of any: {'; '.join(problems) or 'there is none'}. Restore it, or train on "
        "under another run_id with "
        "trainer.model_path set to published weights"
    )


def load(directory: Path, settings: TrainerSettings) -> Policy:
    """The policy of a checkpoint, as it was when it was saved."""
    policy = Policy(directory / MODEL, settings)
    policy.restore(torch.load(directory / TRAINING, map_location="cpu", weights_only=True))
    return policy

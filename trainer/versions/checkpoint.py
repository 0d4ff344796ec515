"""Checkpoints: model, optimiser, random states and the position.

`<checkpoint_dir>/<run>/<sync index>.<attempt>/`: `model/` (Hugging Face layout), `training.pt`,
`clawstream.json`. The sampler has no state of its own: batch order is the position, shuffles follow
from it. A checkpoint counts only once its version is on the weights log.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from runtime.logs import logger
from schemas.records import WeightVersion
from schemas.settings import TrainerSettings
from trainer.errors import CheckpointLost, InvalidCheckpoint
from trainer.model.policy import Policy
from trainer.versions.directory import VersionState, directory_of, new_directory, verify
from trainer.versions.history import version_of

MODEL = "model"
TRAINING = "training.pt"


def save(root: Path, state: VersionState, policy: Policy) -> Path:
    """Write the checkpoint of a version and return its directory. OSError leaves none."""
    with new_directory(root, state) as tmp:
        policy.save(tmp / MODEL)
        torch.save(policy.training_state(), tmp / TRAINING)
    return directory_of(root, state.version)


def newest(root: Path, versions: Sequence[WeightVersion]) -> tuple[VersionState, Path] | None:
    """Find the newest version (log order) whose checkpoint is complete.

    Returns:
        Its state and directory; None when there are no versions.

    Raises:
        CheckpointLost: there are versions, but no checkpoint of them.
    """
    problems = []
    for version in reversed(versions):
        directory = directory_of(root, version_of(version))
        try:
            state = verify(directory)
            if state.version == version_of(version):
                return state, directory
            problem = f"{directory}: is of version {state.version}, not of {version.version_id}"
        except InvalidCheckpoint as e:
            problem = str(e)
        if directory.exists():  # pruned ones are normal
            problems.append(problem)
            logger().warning("checkpoint_not_usable", version=version.version_id, error=problem)
    if not versions:
        return None
    raise CheckpointLost(
        f"run {versions[-1].run_id} has {len(versions)} versions up to {versions[-1].version_id}, "
        f"but {root} has no whole checkpoint of any: {'; '.join(problems) or 'there is none'}. "
        "Restore it, or train on under another run_id with trainer.model_path set to published "
        "weights"
    )


def load(directory: Path, settings: TrainerSettings) -> Policy:
    """Return the policy of a checkpoint, as it was when it was saved."""
    policy = Policy(directory / MODEL, settings)
    policy.restore(torch.load(directory / TRAINING, map_location="cpu", weights_only=True))
    return policy

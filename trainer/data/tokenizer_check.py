"""Refuse token ids that another tokenizer made: in this model they stand for other tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import Trajectory


def check_tokenizer(trajectories: Iterable[Trajectory], own: str | None, batch_seq: int) -> None:
    """Refuse a batch with a trainable step of another tokenizer.

    Nothing is left out instead: trainable steps are sampled by versions of the run, so a difference
    is a wrong setting, not a stray trajectory. Steps without a fingerprint are accepted.

    Args:
        trajectories: of the batch.
        own: fingerprint of the model's tokenizer; None accepts every step.
        batch_seq: number of the batch, for the error.

    Raises:
        SettingsError: a trainable step has another fingerprint.
    """
    if own is None:
        return
    for trajectory in trajectories:
        for step in trajectory.steps:
            found = step.tokenizer_fingerprint
            if step.trainable and found is not None and found != own:
                raise SettingsError(
                    f"setting trainer.model_path: its tokenizer has the fingerprint {own}, but "
                    f"step {step.step_id} of batch {batch_seq} was sampled with {found}: its token "
                    "ids stand for other tokens; train a model with the tokenizer of the data, or "
                    "serve this one (rollout.model_path) under another run_id"
                )

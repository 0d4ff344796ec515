"""Checks of the trainer's settings that need neither torch nor a batch."""

from __future__ import annotations

from collections.abc import Callable

from schemas.errors import SettingsError
from schemas.settings import Settings, TrainerSettings
from trainer.algorithms.advantages import ADVANTAGES


def check_algorithm(settings: Settings) -> None:
    """Raise SettingsError when the run's policy names an algorithm unknown to this trainer."""
    algorithm = settings.admit.policy.algorithm
    if algorithm not in ADVANTAGES:
        raise SettingsError(
            f"setting admit.policy.algorithm={algorithm!r}: this trainer has "
            f"{', '.join(sorted(ADVANTAGES))}"
        )


def check_model(settings: Settings) -> None:
    """Raise SettingsError when the initial weights are missing."""
    path = settings.trainer.model_path
    if path is None:
        raise SettingsError("setting trainer.model_path: not set; there is no model to train")
    if not (path / "config.json").is_file():
        raise SettingsError(
            f"setting trainer.model_path: {path} is no Hugging Face model directory"
        )


def check_learning_rate(settings: TrainerSettings) -> None:
    """Raise SettingsError when the final learning rate can never be reached."""
    if settings.lr_final is not None and settings.max_versions is None:
        raise SettingsError(
            "setting trainer.lr_final: it is reached at trainer.max_versions, which is not set"
        )


CHECKS: tuple[Callable[[Settings], None], ...] = (
    check_algorithm,
    check_model,
    lambda settings: check_learning_rate(settings.trainer),
)

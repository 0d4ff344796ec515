"""Checks of the trainer's settings that need neither torch nor a batch."""

from __future__ import annotations

import os
from collections.abc import Callable

from clawstream.schemas.algorithms import Algorithm, Column
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.rule_spec import is_own
from clawstream.schemas.settings import Settings, TrainerSettings
from clawstream.trainer.algorithms.registry import (
    estimator_of,
    load_function_of,
    needs,
    setting_of,
    specification,
)
from clawstream.trainer.metrics.definitions import ENVIRONMENT, METRICS, label_of


def check_algorithm(settings: Settings) -> None:
    """Raise SettingsError when this trainer cannot train the algorithm of the run's policy."""
    policy = settings.admit.policy
    algorithm = check_named_algorithm(policy.algorithm, settings.trainer)
    if estimator_of(algorithm).credits == "none" and policy.drop_zero_variance:
        raise SettingsError(
            f"setting admit.policy.drop_zero_variance: {policy.algorithm} reads no rewards, but "
            "admission would refuse groups whose rewards are equal or missing; set it to false"
        )


def check_named_algorithm(name: str, settings: TrainerSettings) -> Algorithm:
    """Return the algorithm of that name as the settings change it. No function of it is loaded.

    Raises:
        SettingsError: it is unknown, or it needs a model that this trainer does not have.
    """
    algorithm = specification(name, settings.algorithm.overrides)
    check_models(needs(algorithm), f"setting {setting_of('algorithm')}={name!r}", settings)
    return algorithm


def check_models(columns: frozenset[Column], setting: str, settings: TrainerSettings) -> None:
    """Raise SettingsError when this trainer does not have a model that an algorithm needs.

    Args:
        columns: that the algorithm reads.
        setting: that names the algorithm, for the message.
        settings: paths of the models.
    """
    models = {
        "ref_logprobs": ("trainer.reference_path", settings.reference_path),
        "teacher_logprobs": ("trainer.teacher_path", settings.teacher_path),
        "values": (
            "trainer.critic.path or trainer.model_path",
            settings.critic.path or settings.model_path,
        ),
    }
    for column in sorted(columns):
        name, path = models[column]
        if path is None:
            raise SettingsError(f"{setting}: it needs {name}")


def check_own_functions(settings: Settings) -> None:
    """Raise SettingsError when a user's estimator or loss does not exist or cannot be loaded."""
    own = check_named_algorithm(settings.admit.policy.algorithm, settings.trainer)
    for part, spec in (("advantage", own.advantage), ("loss", own.loss)):
        if is_own(spec):
            load_function_of(part, spec, settings.functions.folders)


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
    """Raise SettingsError when the schedule of the learning rate contradicts itself."""
    s = settings
    if s.lr_decay == "constant" and s.lr_final:
        raise SettingsError(
            "setting trainer.lr_final: a constant learning rate never reaches it; set "
            "trainer.lr_decay=linear or cosine"
        )
    if s.lr_decay != "constant" and (s.max_versions or 0) <= s.lr_warmup_versions:
        raise SettingsError(
            f"setting trainer.lr_decay={s.lr_decay}: it ends at trainer.max_versions, which must "
            f"be set to more than trainer.lr_warmup_versions={s.lr_warmup_versions}"
        )


def check_best_by(settings: TrainerSettings) -> None:
    """Raise SettingsError when the best version is sought by a metric that does not exist."""
    if settings.keep_best_by is None:
        return
    setting = f"setting trainer.keep_best_by={settings.keep_best_by}"
    metric, name = label_of(settings.keep_best_by)
    if metric not in METRICS:
        raise SettingsError(
            f"{setting}: there is no such metric; docs/trainer.md lists all of them"
        )
    of_environment = metric.startswith(ENVIRONMENT)
    if of_environment and name not in settings.environments:
        raise SettingsError(f"{setting}: {name!r} is not in trainer.environments; add it")


def check_versions(settings: Settings) -> None:
    """Raise SettingsError when versions cannot be published as the settings say."""
    from fsspec import get_filesystem_class  # type: ignore[import-untyped]  # heavy for the CLI

    if settings.trainer.full_every > 1 and settings.trainer.lora.rank is not None:
        raise SettingsError(
            f"setting trainer.full_every={settings.trainer.full_every}: with trainer.lora.rank "
            "every version is an adapter, which is small and never a delta; leave it out"
        )
    uris = {
        "checkpoint_dir": str(settings.checkpoint_dir),
        "weights_uri": settings.weights_uri,
        "checkpoint_uri": settings.checkpoint_uri,
    }
    places = dict[str, str]()
    for name, uri in uris.items():
        if uri is None:
            continue
        scheme, is_url, _ = uri.partition("://")
        try:
            get_filesystem_class(scheme if is_url else "file")
        except (ValueError, ImportError) as e:
            raise SettingsError(f"setting trainer.{name}={uri}: {e}") from e
        other = places.setdefault(uri if is_url else os.path.realpath(uri), name)
        if other != name:
            raise SettingsError(
                f"setting trainer.{name}={uri}: trainer.{other} is the same place, and the "
                "directories of a version would have the same name; choose another place"
            )


CHECKS: tuple[Callable[[Settings], None], ...] = (
    check_algorithm,
    check_own_functions,
    check_model,
    lambda settings: check_learning_rate(settings.trainer),
    lambda settings: check_best_by(settings.trainer),
    check_versions,
)

"""Checks of a rollout worker's settings that need no engine."""

from __future__ import annotations

from importlib.util import find_spec

from rollout.main import create_server, public_url
from rollout.server.process import is_cpu_build
from schemas.errors import SettingsError
from schemas.settings import Settings


def _engine(settings: Settings) -> None:
    for rollout in settings.rollout.of_each_worker:
        worker = settings.model_copy(update={"rollout": rollout})
        public_url(worker, create_server(worker).base_url)


def _installed(settings: Settings) -> None:
    if not settings.rollout.attach_urls and find_spec("vllm") is None:
        raise SettingsError(
            "rollout: vLLM is not installed, see docs/install.md; or set rollout.attach_urls"
        )


def _gpus(settings: Settings) -> None:
    rollout = settings.rollout
    if rollout.workers > 1 and not (rollout.gpus or rollout.attach_urls or is_cpu_build()):
        raise SettingsError(
            f"rollout.gpus: name the GPUs of each of the {rollout.workers} workers, for example "
            "[0, 1]; otherwise all engines take the first GPU"
        )


CHECKS = (_engine, _installed, _gpus)

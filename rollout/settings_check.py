"""Checks of a rollout worker's settings that need no engine."""

from __future__ import annotations

from importlib.util import find_spec

from rollout.main import create_server, public_url
from schemas.errors import SettingsError
from schemas.settings import Settings


def _engine(settings: Settings) -> None:
    public_url(settings, create_server(settings).base_url)


def _installed(settings: Settings) -> None:
    if settings.rollout.attach_url is None and find_spec("vllm") is None:
        raise SettingsError(
            "rollout: vLLM is not installed, see docs/install.md; or set rollout.attach_url"
        )


CHECKS = (_engine, _installed)

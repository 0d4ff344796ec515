"""Checks the gateway's settings without starting the gateway."""

from __future__ import annotations

from clawstream.gateway.asgi.connection_limit import check_open_files
from clawstream.gateway.auth.session_keys import secret_of
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.redaction.redactor import redaction_of
from clawstream.rewards.registry import rule_of
from clawstream.runtime.functions.pool import FunctionPool
from clawstream.runtime.process.open_files import highest_limit
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings


def _compute_reward(settings: Settings) -> None:
    if settings.gateway.compute_reward is not None:
        with FunctionPool(settings.functions) as pool:
            models = settings.reward_models
            rule_of(settings.gateway.compute_reward, "gateway.compute_reward", pool.find, models)


def _upstreams(settings: Settings) -> None:
    EngineRegistry(settings.gateway.upstreams)


def _redaction(settings: Settings) -> None:
    redaction_of(settings, b"", lambda: None)


def _tokenizer(settings: Settings) -> None:
    path = settings.gateway.tokenizer_path
    if path is not None and not path.exists():
        raise SettingsError(f"setting gateway.tokenizer_path: {path} does not exist")


def _session_secret(settings: Settings) -> None:
    if settings.gateway.session_secret is not None:
        secret_of(settings)


def _open_files(settings: Settings) -> None:
    check_open_files(highest_limit(), settings.gateway.max_in_flight)


CHECKS = (_session_secret, _compute_reward, _upstreams, _redaction, _tokenizer, _open_files)

"""Errors between a weight version and a serving engine."""

from __future__ import annotations

from clawstream.schemas.errors import ForeseenError


class RolloutError(ForeseenError):
    """Root of all errors of `rollout`."""


class InvalidWeights(RolloutError):
    """The tensors of a weight version do not fit the engine's model; the version is never retried.

    The engine continues to serve the old version.
    """


class EngineUnavailable(RolloutError):
    """The engine did not answer, or refused before its model was changed; the load is repeated."""


class EngineChanged(RolloutError):
    """Another worker loaded a version into this engine.

    `label` is the version that the engine serves now.
    """

    def __init__(self, base_url: str, label: str, expected: str) -> None:
        super().__init__(f"{base_url} serves {label}, not {expected}: another worker loaded it")
        self.label = label


class EngineBroken(RolloutError):
    """The engine failed while its weights were replaced. They are unknown; it must be restarted."""


class ServerFailed(RolloutError):
    """A vLLM server did not start, or ended; the message names its log."""

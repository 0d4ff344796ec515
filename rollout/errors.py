"""What can go wrong between a weight version and a serving engine."""

from __future__ import annotations

from schemas.errors import ForeseenError


class RolloutError(ForeseenError):
    """Root of all errors of `rollout`."""


class InvalidWeights(RolloutError):
    """A weight version is not what it says: a file is missing or altered, or its tensors do not
    fit.

    The old version serves on.
    """


class WeightsUnreadable(RolloutError):
    """A file of a weight version can't be read now, such as while its file system is away.

    The old version serves on; try again later.
    """


class EngineUnavailable(RolloutError):
    """The engine did not answer, or refused before its model was touched.

    The old version serves on; try again.
    """


class EngineChanged(RolloutError):
    """Another worker loaded a version into this engine.

    `label` is the version that the engine serves now.
    """

    def __init__(self, base_url: str, label: str, expected: str) -> None:
        super().__init__(f"{base_url} serves {label}, not {expected}: another worker loaded it")
        self.label = label


class EngineBroken(RolloutError):
    """The engine failed while its weights were being replaced: what it holds is unknown.

    It must be restarted.
    """


class ServerFailed(RolloutError):
    """A vLLM server did not start, or ended; the message names its log."""

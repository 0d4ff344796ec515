"""An environment: a function that makes a flow of one of its names and a split of its tasks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Flow, module_of
from clawstream.agent_flow.gateway.client import Channel
from clawstream.agent_flow.user_code import users_code

BUILT_IN = {
    "reasoning_gym": "reasoning-gym",
    "textarena": "textarena",
    "verifiers": "verifiers",
}
"""Modules of this package, and what to install for them."""
DEFAULT_SIZE = 1000
"""Tasks of an environment that generates them."""
SEEDS_OF_A_CHANNEL = 1 << 30


@dataclass(frozen=True, slots=True)
class Split:
    """The tasks of an environment that are played.

    Attributes:
        channel: train or val. They have no task in common where the environment generates tasks.
        size: number of different tasks; None: all, or `DEFAULT_SIZE` generated ones.
        seed: of the first generated task.
        config: settings of the environment, in its own terms.
    """

    channel: Channel = "train"
    size: int | None = None
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seeds(self) -> range:
        """One seed for each generated task."""
        first = self.seed + (SEEDS_OF_A_CHANNEL if self.channel == "val" else 0)
        return range(first, first + (self.size or DEFAULT_SIZE))


Environment = Callable[[str, Split], Flow]
"""The function `environment` of a module. Raises FlowError if there is no such name or setting."""


def load_environment(spec: str, split: Split) -> Flow:
    """Return the flow of an environment.

    Args:
        spec: `LIBRARY:NAME` with a library of `BUILT_IN`; or `FILE.py:NAME` or `MODULE:NAME` of a
            module with a function `environment`.
        split: The tasks.

    Raises:
        FlowError: There is no such environment, its library is not installed, or it raises
            something.
    """
    library, _, name = spec.partition(":")
    if library not in BUILT_IN:
        module = module_of(library)
    elif not name:
        raise FlowError(f"env={spec}: must be env={library}:NAME")
    else:
        try:
            module = importlib.import_module(f"clawstream.agent_flow.environments.{library}")
        except ModuleNotFoundError as error:
            raise FlowError(
                f"env={spec}: {error}; install the package {BUILT_IN[library]} (in a checkout of "
                "Clawstream: make environments)"
            ) from error
    make = getattr(module, "environment", None)
    if not callable(make):
        raise FlowError(
            f"env={spec}: {library} has no function environment(name, split); there are "
            f"{', '.join(BUILT_IN)}, and files and modules of your own"
        )
    with users_code(f"env={spec}: environment()"):
        flow = make(name, split)
    if not isinstance(flow, Flow):
        raise FlowError(f"env={spec}: environment() returned a {type(flow).__name__}, not a flow")
    return flow

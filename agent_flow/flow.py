"""Flows: an async function of a task and a rollout, its tasks and its limits."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task
from clawstream.agent_flow.threads import in_thread
from clawstream.agent_flow.user_code import users_code

Play = Callable[[Task, Rollout], Any]
"""Returns the reward (`outcome.Reward`), or an awaitable of it."""
TaskSource = Callable[[], Iterable[Task]]
Lifespan = Callable[[], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a flow.

    Attributes:
        group_size: rollouts of each task.
        concurrency: rollouts at the same time, in one process.
        timeout_s: of one rollout.
        attempts: rollouts that may fail in one place of a group, until the place counts as failed.
    """

    group_size: int = 8
    concurrency: int = 64
    timeout_s: float = 600.0
    attempts: int = 2

    def __post_init__(self) -> None:
        """Raises FlowError if a limit is not positive."""
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise FlowError(f"{name}={getattr(self, name)!r}: must be above 0")


class Flow:
    """What plays a task. Made by `flow`; also a way to call the function itself.

    Attributes:
        name: given, or of the function; group ids start with it.
        limits: defaults of `clawstream flow run`.
        while_played: async context manager that is entered before the first task is taken, and left
            when all rollouts have ended.
    """

    def __init__(self, play: Play, limits: Limits, name: str | None = None) -> None:
        self.name = name or getattr(play, "__name__", type(play).__name__)
        self.limits = limits
        self._play = play
        self._source: TaskSource | None = None
        self.while_played: Lifespan = nullcontext

    def tasks(self, source: TaskSource) -> TaskSource:
        """Decorate the function that yields the tasks."""
        self._source = source
        return source

    def lifespan(self, function: Lifespan) -> Lifespan:
        """Decorate the async context manager that starts and stops what all rollouts share."""
        self.while_played = function
        return function

    @property
    def source(self) -> TaskSource:
        """Function that yields the tasks.

        Raises:
            FlowError: The flow has none.
        """
        if self._source is None:
            raise FlowError(
                f"flow {self.name}: no tasks; decorate a generator with @{self.name}.tasks, "
                "or give tasks=FILE"
            )
        return self._source

    async def __call__(self, task: Task, rollout: Rollout) -> Any:
        """Play one task. A function that is not async runs in a thread."""
        if inspect.iscoroutinefunction(self._play):
            return await self._play(task, rollout)
        result = await in_thread(self._play, task, rollout)
        return await result if inspect.isawaitable(result) else result


def flow(
    group_size: int = 8, concurrency: int = 64, timeout_s: float = 600.0, attempts: int = 2
) -> Callable[[Play], Flow]:
    """Make a flow of a function of a task and a rollout that returns the reward.

    An exception is a failed rollout, never a reward of zero. The arguments are `Limits`.
    """
    limits = Limits(group_size, concurrency, timeout_s, attempts)
    return lambda play: Flow(play, limits)


def load_flow(spec: str) -> Flow:
    """Return the flow of `FILE.py:NAME` or `MODULE:NAME`.

    Raises:
        FlowError: There is none.
    """
    place, _, name = spec.partition(":")
    if not place or not name:
        raise FlowError(f"{spec!r}: must be FILE.py:NAME or MODULE:NAME")
    found = getattr(module_of(place), name, None)
    if isinstance(found, Flow):
        return found
    if found is None:
        raise FlowError(f"{spec!r}: {place} has no {name!r}")
    raise FlowError(f"{spec!r}: not a flow; decorate the function with @flow()")


def load_function(spec: str) -> Callable[..., Any]:
    """Return the function of `FILE.py:NAME` or `MODULE:NAME`.

    Raises:
        FlowError: There is none.
    """
    place, _, name = spec.partition(":")
    found = getattr(module_of(place), name, None) if place and name else None
    if not callable(found):
        raise FlowError(f"{spec!r}: must be FILE.py:FUNCTION or MODULE:FUNCTION, and exist")
    return found  # type: ignore[no-any-return]


def module_of(place: str) -> Any:
    """Import `FILE.py`, or a module that may be in the working directory.

    Raises:
        FlowError: There is none, or its import raises something.
    """
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        package = place.partition(".")[0]
        with users_code(f"module {place}"):
            if importlib.util.find_spec(package) is None:
                raise FlowError(f"module {place!r}: No module named {package!r}")
            return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise FlowError(f"{place}: no such file")
    # Its neighbours can be imported, as if it were run as a script.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FlowError(f"{place}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with users_code(place):
        spec.loader.exec_module(module)
    return module

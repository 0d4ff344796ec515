"""The child process in which users' functions run.

Its command is `python -P -m clawstream.runtime.functions.worker FD MEMORY_MB FOLDER...`.

It answers requests on the socket FD, one at a time, as `clawstream.runtime.functions.child` sends
them. It is killed when a function takes too long, and by the kernel when its parent dies; the
kernel refuses memory above its limit. What functions print goes to standard error.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from clawstream.schemas.numbers.values import number_of
from clawstream.schemas.rule_spec import REASON_CHARS, reason_text
from clawstream.schemas.user_function import (
    FunctionNotFound,
    batch_size_of,
    load_function,
    told_progress,
)

DEPTH_MAX = 4
"""Lists in an answer: a list of scores has 2 levels."""
EXIT_MEMORY = 73
"""Exit code of a process whose function needed more memory than its limit."""
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
"""What a function may raise; more than these ends its process."""

PROGRESS = "progress"
PROGRESS_EVERY_S = 0.25
"""Progress is told to the parent at most this often."""
Answer = tuple[str, Any]
"""`("answer", value)`, `("missing", why)` for a function that does not exist, `("raised", reason)`,
`("batch_raised", reason)` for all arguments of a batch, or `(PROGRESS, None)`, which answers none.
"""
Tell = Callable[[int, Answer], None]
"""Sends the answer for the argument of an index."""


def to_builtins(answer: Any, depth: int = 0) -> Any:
    """Convert a function's answer to numbers, texts, lists and mappings for the parent process.

    Raises:
        TypeError: The answer has another type.
    """
    if answer is None or isinstance(answer, bool):
        return answer
    if isinstance(answer, str):  # never a user's subclass, which the parent may fail to load
        return str.__getitem__(answer, slice(REASON_CHARS))
    if isinstance(answer, bytes):
        return bytes.__getitem__(answer, slice(REASON_CHARS))
    with suppress(TypeError):
        return number_of(answer)
    if depth < DEPTH_MAX and isinstance(answer, Mapping):
        return {
            to_builtins(key, DEPTH_MAX): to_builtins(value, depth + 1)
            for key, value in answer.items()
        }
    if depth < DEPTH_MAX and isinstance(answer, Iterable):
        return [to_builtins(value, depth + 1) for value in answer]
    raise TypeError(f"a function answers with numbers, not {type(answer).__name__}")


def failure(error: BaseException, folders: Sequence[Path] = ()) -> Answer:
    """Return the answer of a function that raised: the error and the line of the user's that did.

    Args:
        error: What it raised.
        folders: Of users' files; none for a function that is not the user's.

    Raises:
        MemoryError: That is the error.
    """
    if isinstance(error, MemoryError):
        raise error
    text = reason_text(
        error if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
    )
    where = next(_places(error, folders), "")
    return "raised", text[: REASON_CHARS - len(where)] + where


def _places(error: BaseException, folders: Sequence[Path]) -> Iterator[str]:
    """Yield the places in users' files that led to an error, the innermost first."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        for folder in folders:
            if path.is_relative_to(folder) and "site-packages" not in path.parts:
                yield f" ({str(path.relative_to(folder))[-80:]}, line {frame.lineno})"
                break


def _load(target: str, configuration: str | None, folders: Sequence[Path]) -> Callable[..., Any]:
    """Load a function; with a configuration, the function that the target returns for it."""
    loaded = load_function(target, folders)
    if configuration is None:
        return loaded
    try:
        return loaded(json.loads(configuration))  # type: ignore[no-any-return]
    except Exception as e:  # a user's function: any error is the reason
        raise FunctionNotFound(str(failure(e)[1])) from e


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object with `__call__`, returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - its kind, not whether it is there
    )


async def _answer_all(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    timeout_s: float,
    tell: Tell,
    folders: Sequence[Path],
) -> None:
    """Call an async function for all arguments at once, each with the time-out.

    `progress` begins the time of all of them again, because they share what they wait for.
    """
    now, running, told = asyncio.get_running_loop().time, set[asyncio.Timeout](), -math.inf

    async def one(index: int, argument: Any) -> None:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                running.add(limit)
                try:
                    tell(index, ("answer", to_builtins(await function(argument))))
                finally:
                    running.discard(limit)
        except FAILURES as e:
            tell(index, ("raised", "timeout") if limit.expired() else failure(e, folders))

    def go_on() -> None:
        nonlocal told
        for limit in running:
            if not limit.expired():
                limit.reschedule(now() + timeout_s)
        if now() - told > PROGRESS_EVERY_S:
            told = now()
            tell(0, (PROGRESS, None))

    with told_progress(go_on):
        await asyncio.gather(*(one(index, argument) for index, argument in enumerate(arguments)))


def _answers_of_batch(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    runner: asyncio.Runner,
    folders: Sequence[Path],
) -> list[Answer]:
    """Call a batched function; if it fails, that is the answer for each argument."""
    try:
        result = function(arguments)
        if inspect.iscoroutine(result):
            result = runner.run(result)
        answers: list[Answer] = [("answer", to_builtins(value)) for value in result]
        if len(answers) != len(arguments):
            raise ValueError(f"{len(answers)} results for {len(arguments)} trajectories")
        return answers
    except FAILURES as e:
        return [("batch_raised", failure(e, folders)[1])] * len(arguments)


def answer_call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    timeout_s: float,
    runner: asyncio.Runner,
    tell: Tell,
    folders: Sequence[Path],
) -> None:
    """Tell the answer for each argument. folders: of users' files, for the place of an error.

    A MemoryError is not caught: it ends the process.
    """
    if batch_size_of(function) is not None:
        for index, answer in enumerate(_answers_of_batch(function, arguments, runner, folders)):
            tell(index, answer)
    elif is_async(function):
        runner.run(_answer_all(function, arguments, timeout_s, tell, folders))
    else:
        for index, argument in enumerate(arguments):
            try:
                answer = "answer", to_builtins(function(argument))
            except FAILURES as e:
                answer = failure(e, folders)
            tell(index, answer)


def _serve(parent: Connection, folders: Sequence[Path], runner: asyncio.Runner) -> None:
    """Answer requests until the parent closes the socket."""
    loaded = dict[tuple[str, str | None], Callable[..., Any]]()

    def tell(index: int, answer: Answer) -> None:
        parent.send((index, *answer))

    while True:
        try:
            kind, source, *call = parent.recv()
        except EOFError:
            return
        if kind == "call":
            arguments, timeout_s = call
            own = [*folders, Path(source[0].rpartition(":")[0]).parent] if source[1] is None else []
            answer_call(loaded[source], arguments, timeout_s, runner, tell, own)
            continue
        try:
            target, configuration = source
            loaded[source] = function = _load(target, configuration, folders)
            size = batch_size_of(function) or (sys.maxsize if is_async(function) else 1)
            parent.send((0, "answer", size))
        except FunctionNotFound as e:
            parent.send((0, "missing", str(e)))


def main(words: Sequence[str]) -> None:
    """Set the memory limit and answer requests."""
    limit = int(words[1]) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with Connection(int(words[0])) as parent, asyncio.Runner() as runner:
        try:
            _serve(parent, [Path(word) for word in words[2:]], runner)
        except MemoryError:
            os._exit(EXIT_MEMORY)  # allocates nothing, and the parent sees the code


if __name__ == "__main__":
    main(sys.argv[1:])

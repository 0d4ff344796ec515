"""Run blocking functions and iterables of users beside the event loop.

The threads are daemons: unlike with `asyncio.to_thread`, a function that never returns does not
keep the process from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_END: Any = object()


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the function's result, computed in a thread of its own.

    Raises:
        RuntimeError: The function ends its thread, by `sys.exit` or the like.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        _answer(loop, future, lambda: function(*args, **kwargs))

    threading.Thread(target=run, name=f"flow-{function}", daemon=True).start()
    return await future


async def iterate_in_thread(make: Callable[[], Iterable[T]]) -> AsyncIterator[T]:
    """Yield the items of an iterable whose iterator may block.

    One thread makes the iterable and takes all items, each when it is asked for: some iterators may
    only be used in the thread that made them.

    Raises:
        Exception: As the iterable raises it.
        RuntimeError: The iterable ends its thread, by `sys.exit` or the like.
    """
    loop = asyncio.get_running_loop()
    asked: queue.SimpleQueue[asyncio.Future[Any] | None] = queue.SimpleQueue()

    def run() -> None:
        iterator: Any = None

        def following() -> Any:
            nonlocal iterator
            iterator = iter(make()) if iterator is None else iterator
            return next(iterator, _END)

        while (future := asked.get()) is not None:
            _answer(loop, future, following)

    threading.Thread(target=run, name=f"flow-{make}", daemon=True).start()
    try:
        while True:
            future: asyncio.Future[Any] = loop.create_future()
            asked.put(future)
            if (item := await future) is _END:
                return
            yield item
    finally:
        asked.put(None)


def _answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], function: Callable[[], Any]
) -> None:
    """Set the future, which belongs to the loop, to what the function returns or raises."""

    def give(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            # A future takes no StopIteration, and SystemExit would end the event loop.
            cause, error = error, RuntimeError(repr(error))
            error.__cause__ = cause
        with suppress(RuntimeError):  # the loop has ended without the function
            loop.call_soon_threadsafe(give, future.set_exception, error)
    else:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(give, future.set_result, result)

"""Run blocking functions of users beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the function's result, computed in a daemon thread.

    Unlike `asyncio.to_thread`, a function that never returns does not keep the process from ending.

    Raises:
        RuntimeError: The function ends its thread, by `sys.exit` or the like.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def give(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        try:
            result = function(*args, **kwargs)
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

    threading.Thread(target=run, name=f"flow-{function}", daemon=True).start()
    return await future

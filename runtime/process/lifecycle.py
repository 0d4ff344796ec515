"""Start, stop and end a process: signals set a stop event, errors become exit codes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from clawstream.runtime.exit_codes import exit_code, is_foreseen, message_of
from clawstream.runtime.logs import configure, logger
from clawstream.runtime.process.open_files import raise_limit
from clawstream.schemas.settings import Settings

GC_THRESHOLD = (10_000, 10, 10)
"""Thresholds of Python's garbage collector.

At the default of 700 for the youngest generation, a tenth of the stream jobs' CPU time is spent on
long-lived state without cycles.
"""


def die(error: BaseException) -> None:
    """Log an error and exit at once, without clean-up that could write more.

    Recovery handles a crash. An error whose message says what to do is logged without a traceback.
    """
    while isinstance(
        error, BaseExceptionGroup
    ):  # of a task group: what its first task has failed with
        error = error.exceptions[0]
    code = exit_code(error)
    try:
        trace = None if is_foreseen(error) else error
        logger().error("process_died", exit_code=code, error=message_of(error), exc_info=trace)
        sys.stderr.flush()
    finally:
        os._exit(code)


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """From a thread: call it on the loop; nothing, when the loop has ended before the thread."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def _begin(process: str, settings: Settings) -> None:
    """Set what the whole process needs: log, open files, and the collection of garbage.

    What was imported stays: it is not looked through for garbage again.
    """
    configure(process, settings.log_level)
    raise_limit()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


def run_async(
    process: str, settings: Settings, main: Callable[[Settings, asyncio.Event], Awaitable[None]]
) -> None:
    """Run `main(settings, stop)` and exit; SIGTERM and SIGINT set `stop`. Never returns.

    The exit code is 0, or that of the error.
    """

    async def body() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await main(settings, stop)

    _begin(process, settings)
    try:
        asyncio.run(body())
    except Exception as e:  # noqa: BLE001 - the end of the process: logged with its traceback, told by the exit code
        die(e)
    sys.exit(0)


def run_sync(
    process: str, settings: Settings, main: Callable[[Settings, threading.Event], None]
) -> None:
    """As run_async, for processes with a plain loop."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _begin(process, settings)
    try:
        main(settings, stop)
    except Exception as e:  # noqa: BLE001 - as above
        die(e)
    sys.exit(0)

"""How a process starts, stops and dies: signals to a stop event, errors to exit codes that the supervisor understands."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from runtime.kafka import Fenced, SourceTruncated
from runtime.telemetry import configure, logger
from schemas.errors import SettingsError
from schemas.settings import Settings

EXIT_SETTINGS = 2
"""Wrong settings: a restart can't help."""
EXIT_CRASH = 70
"""Anything unforeseen: restart, the log is the truth."""
EXIT_FENCED = 78
"""A newer instance took over: never restart."""
EXIT_SOURCE = 79
"""A stored position does not fit its topic: an operator must look, never restart."""
GC_THRESHOLD = (10_000, 10, 10)
"""Containers more before the youngest are looked through for cycles; then how seldom the older, as Python has it. At Python's own 700 a tenth of the stream
jobs' CPU went there, over long-lived state in which there are none."""
NO_RESTART = frozenset({0, EXIT_SETTINGS, EXIT_FENCED, EXIT_SOURCE})


def exit_code(error: BaseException) -> int:
    """The exit code that says what happened."""
    match error:
        case SettingsError():
            return EXIT_SETTINGS
        case Fenced():
            return EXIT_FENCED
        case SourceTruncated():
            return EXIT_SOURCE
        case _:
            return EXIT_CRASH


def die(error: BaseException) -> None:
    """Log and end at once, without any clean-up that could write something more. A crash is what recovery is made for."""
    try:
        logger().error("process_died", exit_code=exit_code(error), error=str(error), exc_info=error)
        sys.stderr.flush()
    finally:
        os._exit(exit_code(error))


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """From a thread: call it on the loop; nothing, when the loop has ended before the thread."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def _settle_memory() -> None:
    """What was imported stays: it is not looked through for garbage again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)


def run_async(process: str, settings: Settings, main: Callable[[Settings, asyncio.Event], Awaitable[None]]) -> None:
    """Run `main(settings, stop)`; SIGTERM and SIGINT set `stop`. Never returns: exits 0, or with the error's code."""

    async def body() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await main(settings, stop)

    configure(process, settings.log_level)
    _settle_memory()
    try:
        asyncio.run(body())
    except Exception as e:  # noqa: BLE001 - the end of the process: logged with its traceback, told by the exit code
        die(e)
    sys.exit(0)


def run_sync(process: str, settings: Settings, main: Callable[[Settings, threading.Event], None]) -> None:
    """As run_async, for processes with a plain loop."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    configure(process, settings.log_level)
    _settle_memory()
    try:
        main(settings, stop)
    except Exception as e:  # noqa: BLE001 - as above
        die(e)
    sys.exit(0)

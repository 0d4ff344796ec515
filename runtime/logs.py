"""Logs: readable on a terminal, JSON lines elsewhere. Never a key, a prompt or a token."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from typing import Any, TextIO, cast


class _Lossy:
    """A stream that drops output on write errors: a full disk must not end the process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class LogThrottle(logging.Filter):
    """Lets loggers whose names begin with `prefix` say the same thing only every `interval_s`."""

    def __init__(self, prefix: str, interval_s: float) -> None:
        super().__init__()
        self._prefix, self._interval_s = prefix, interval_s
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._prefix):
            return True
        now, what = time.monotonic(), record.getMessage()[:40]
        if now - self._said.get(what, -self._interval_s) < self._interval_s:
            return False
        if len(self._said) > 1000:
            self._said.clear()
        self._said[what] = now
        return True


def configure(process: str, level: str = "info") -> None:
    """Configure structlog and the standard library's logging.

    Call once, at the start of a process.
    """
    import structlog

    number = logging.getLevelNamesMapping()[level.upper()]
    terminal = sys.stderr.isatty()
    render: Any = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Lossy(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            render,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    structlog.contextvars.bind_contextvars(process=process)


def logger() -> Any:
    """A bound logger: `log.info("event_name", key=value)`."""
    import structlog  # here, so that the training maths loads without it

    return structlog.get_logger()

"""One process at a time: an advisory lock on a file, waited for with a bound and not in silence."""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

REPORT_EVERY_S = 10.0
_POLL_S = 0.05


@contextmanager
def exclusive(
    path: Path,
    late: Exception,
    patience_s: float = math.inf,
    waiting: Callable[[float], None] | None = None,
    report_every_s: float = REPORT_EVERY_S,
) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it when the process dies.

    Args:
        path: The lock file; created if absent.
        late: The error to raise after `patience_s`.
        patience_s: Longest wait in seconds; 0: one attempt.
        waiting: Called with the seconds waited, every `report_every_s`.
        report_every_s: Seconds between two calls of `waiting`.
    """
    with path.open("a") as file:
        started = reported = time.monotonic()
        while not _taken(file):
            now = time.monotonic()
            if waiting is not None and now - reported >= report_every_s:
                reported = now
                waiting(now - started)
            if now - started >= patience_s:
                raise late
            time.sleep(_POLL_S)
        yield


def _taken(file: TextIOWrapper) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

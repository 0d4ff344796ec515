"""The limit of open files of this process. Sockets are files."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress

MOST = 1 << 20
"""The limit is not raised above this number: some programs look at every possible file."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE)


def limit() -> int:
    """Return how many files this process may have open."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def highest_limit() -> int:
    """Return the limit that `raise_limit` sets."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def raise_limit() -> None:
    """Raise the soft limit to the hard one; a login shell has a soft limit of 1,024 files.

    Child processes inherit it.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit() < highest_limit():
        with suppress(ValueError, OSError):  # the system has another bound
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest_limit(), hard))


def exhausted(error: BaseException) -> str | None:
    """Return what to do if the cause of an error is that no more files can be opened; else None."""
    if not isinstance(error, OSError):
        return None
    known = error.errno is not None and error.errno > 0
    if error.errno in EXHAUSTED or (not known and not _opens()):  # a name was not resolved
        return (
            f"EMFILE, too many open files: the limit of this process is {limit()}; raise it "
            "(ulimit -n, LimitNOFILE of systemd)"
        )
    return None


def _opens() -> bool:
    try:
        os.close(os.dup(0))
    except OSError as error:
        return error.errno not in EXHAUSTED
    return True


def _bounded(files: int) -> int:
    return MOST if files == resource.RLIM_INFINITY else min(files, MOST)

"""A process that can open no more files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_left() -> Iterator[None]:
    """Let this process open no file; files that are open stay usable."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, limits[1]))
    try:
        while True:
            try:
                held.append(os.dup(0))
            except OSError as error:
                assert error.errno == errno.EMFILE
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in held:
            os.close(file)

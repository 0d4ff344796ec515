"""Start and end `clawstream.query.sandbox_process`, the process that runs one query.

Its imports take a second, so it can start before its caller has settings or a query and before the
caller's own imports: this module imports no large library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import IO, NamedTuple

from clawstream.runtime.process.child import die_with_parent

for _name in ("pyarrow", "duckdb", "deltalake"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"No module named {_name!r}", name=_name
        )  # here, where the caller can say so

_COMMAND = (sys.executable, "-P", "-m", "clawstream.query.sandbox_process")
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
"""Address space is limited: some allocators would reserve too much of it in advance."""


class QueryProcess(NamedTuple):
    """A process that waits for one request.

    process: its standard output is the result. errors: its error message, if it fails.
    """

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def send(self, request: str) -> None:
        """Send the request."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # `errors` has the reason
            stdin.write(request.encode())


@contextmanager
def query_process() -> Iterator[QueryProcess]:
    """Start a process, which ends with the context."""
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, "rb") as errors,
        subprocess.Popen(
            die_with_parent([*_COMMAND, str(writing)]), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, pass_fds=(writing,), env=os.environ | _ENVIRONMENT,
            start_new_session=True,  # Ctrl-C goes to this process, which ends the child
        ) as process,
    ):  # fmt: skip
        os.close(writing)
        try:
            yield QueryProcess(process, errors)
        finally:
            process.kill()

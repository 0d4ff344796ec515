"""Start, ask and end `clawstream.query.sandbox_process`, the process that runs one query.

Its imports take a second, so it can start before its caller has settings or a query and before the
caller's own imports: this module imports no large library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from types import TracebackType
from typing import IO, Any, Self

from runtime.process.child import die_with_parent

for _name in ("pyarrow", "duckdb", "deltalake"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"No module named {_name!r}", name=_name
        )  # here, where the caller can say so

_COMMAND = (sys.executable, "-P", "-m", "clawstream.query.sandbox_process")
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
"""Address space is limited: some allocators would reserve too much of it in advance."""


class QueryProcess:
    """A process that waits for one request and ends with the context.

    process: its standard output is the result. errors: its error message, if it fails.
    """

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.errors: IO[bytes] = os.fdopen(reading, "rb")
        self.process = subprocess.Popen(
            die_with_parent([*_COMMAND, str(writing)]), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, pass_fds=(writing,),
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,  # Ctrl-C goes to this process, which ends the child
        )  # fmt: skip
        os.close(writing)

    def send_request(self, request: Mapping[str, Any]) -> None:
        """Send the request."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:  # `errors` has the reason
            stdin.write(json.dumps(request).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()

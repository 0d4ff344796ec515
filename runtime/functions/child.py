"""One child process of a function pool, seen from its parent."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any, NamedTuple

from clawstream.runtime.functions.worker import EXIT_MEMORY, PROGRESS
from clawstream.runtime.process.child import die_with_parent
from clawstream.schemas.settings import FunctionSettings
from clawstream.schemas.user_function import FunctionNotFound

LOAD_TIMEOUT_S = 300.0
"""For the import of a function's file: it may import large libraries."""
TIMEOUT, CRASHED = "timeout", "crashed"
"""Reasons of calls without an answer, on the record."""
GRACE_S = 1.0
"""Time of a child to report its own time-out of an async call."""
STDERR = 2


class Source(NamedTuple):
    """What a child loads.

    target: `file.py:function` or `module:function`. configuration: JSON; the target is then called
    with it once and returns the function. None: the target is the function.
    """

    target: str
    configuration: str | None = None


class Lost(Exception):
    """A child gave no answer and must be dropped. reason: for the record."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class Child:
    """One child process, asked by one thread at a time.

    Attributes:
        deadline: When the request in hand is given up, on the monotonic clock; None: there is none.
    """

    def __init__(self, settings: FunctionSettings) -> None:
        """Start the process. Raises OSError when the machine has no room for it."""
        self.deadline: float | None = None
        self._connection, theirs = Pipe()
        self._memory_mb = settings.memory_mb
        with theirs:
            words = [
                *(sys.executable, "-P", "-m", "clawstream.runtime.functions.worker"),
                *(str(theirs.fileno()), str(settings.memory_mb)),
                *map(str, settings.folders),
            ]
            try:
                self._process = subprocess.Popen(
                    die_with_parent(words),
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError:
                self._connection.close()
                raise
        self._batch_sizes = dict[Source, int]()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def load(self, source: Source) -> int:
        """Load a function, once; return how many arguments one call may have.

        Raises:
            FunctionNotFound: It cannot be loaded.
            Lost: The child ended or took too long.
        """
        if source not in self._batch_sizes:
            ((_, kind, answer),) = self._ask(("load", tuple(source)), 1, LOAD_TIMEOUT_S)
            if kind != "answer":
                raise FunctionNotFound(answer)
            self._batch_sizes[source] = answer
        return self._batch_sizes[source]

    def call(
        self, source: Source, arguments: Sequence[object], timeout_s: float
    ) -> Iterator[tuple[int, str, Any]]:
        """Yield (index of the argument, kind, value) of each answer as it comes.

        Raises:
            Lost: The child ended or took too long; the remaining arguments have no answer.
        """
        request = ("call", tuple(source), arguments, timeout_s)
        return self._ask(request, len(arguments), timeout_s + GRACE_S)

    def _ask(
        self, request: tuple[Any, ...], answers: int, timeout_s: float
    ) -> Iterator[tuple[int, str, Any]]:
        deadline = self.deadline = time.monotonic() + timeout_s
        try:
            self._limit_sending(timeout_s)
            self._connection.send(request)
            while answers:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    raise Lost(TIMEOUT, f"no answer in {timeout_s:g} s")
                answer = self._connection.recv()
                if answer[1] == PROGRESS:
                    deadline = self.deadline = time.monotonic() + timeout_s
                    continue
                answers -= 1
                yield answer
        except BlockingIOError as e:
            raise Lost(TIMEOUT, f"the request was not read in {timeout_s:g} s") from e
        except (EOFError, OSError) as e:
            self.kill()
            code = self._process.wait()
            if code == EXIT_MEMORY:
                reason = f"more memory than functions.memory_mb={self._memory_mb}"
                raise Lost(reason, "its process ended") from e
            raise Lost(CRASHED, f"the process ended with exit code {code}") from e
        finally:
            self.deadline = None

    def _limit_sending(self, timeout_s: float) -> None:
        """Limit the time of sending: a child that does not read must not block the sender."""
        seconds, rest = divmod(timeout_s, 1)
        limit = struct.pack("@ll", int(seconds), max(1, int(rest * 1e6)))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def kill(self) -> None:
        """Kill it and all that it has started.

        The thread that waits for its answer sees its end.
        """
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and give back what it held."""
        self.kill()
        self._process.wait()
        self._connection.close()

"""Run users' functions in a few child processes, each call with a time-out.

A user's function may loop, block, crash or hold the GIL for minutes. In a child process this
affects only its own call: the child is killed with everything it has started, the call gets no
answer, and the next call gets a new child.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

from runtime.logs import logger
from runtime.process.child import die_with_parent
from schemas.rule_spec import NoAnswer
from schemas.settings import FunctionSettings
from schemas.user_function import FunctionNotFound

LOAD_TIMEOUT_S = 300.0
"""For the import of a function's file: it may import large libraries."""
TIMEOUT, CRASHED = "timeout", "crashed"
"""Reasons of calls without an answer, on the record."""
STDERR = 2


class PoolStopped(BaseException):
    """The pool was stopped while a call waited.

    Not an Exception: a failed call is an answer that is recorded, the end of the pool is not.
    """


class FunctionPool:
    """Users' functions as callables that block until a child process answers. Thread-safe."""

    def __init__(self, settings: FunctionSettings) -> None:
        """Nothing is started before the first function is asked for."""
        self.processes, self._timeout_s, self._folders = (
            settings.processes,
            settings.timeout_s,
            settings.folders,
        )
        # The kernel kills a child when the thread that started it ends: one thread starts them all.
        self._starter = ThreadPoolExecutor(1, "function-pool")
        self._slots: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(self.processes):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._children = set[_Child]()
        self._stopped = False

    def find(self, target: str) -> Callable[[Any], Any]:
        """Return the function `file.py:function` or `module:function`, after a child has loaded it.

        Calling it returns the answer as plain values, or raises NoAnswer with the reason, or
        PoolStopped.

        Raises:
            FunctionNotFound: It cannot be loaded.
        """
        try:
            with self._child() as child:
                child.load(target)
        except _Lost as e:
            raise FunctionNotFound(f"loading it: {e.detail}") from e
        return partial(self._call, target)

    def stop(self) -> None:
        """Kill the children.

        Waiting calls raise PoolStopped at once; no further child is started.
        """
        with self._lock:
            self._stopped = True
        self._starter.shutdown(cancel_futures=True)  # waits for the child that is being started
        with self._lock:
            for child in self._children:
                child.kill()
        idle = list[_Child | None]()
        with suppress(queue.Empty):
            while True:
                idle.append(self._slots.get_nowait())
        for slot in idle:
            if slot is not None:
                self._drop(slot)
            self._slots.put(None)  # who waits for a child goes on, and sees that there is none

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, target: str, argument: object) -> Any:
        try:
            with self._child() as child:
                child.load(target)
                kind, answer = child.ask(("call", target, argument), self._timeout_s)
        except _Lost as e:
            logger().warning(
                "function_gave_no_answer", function=target, reason=e.reason, detail=e.detail
            )
            raise NoAnswer(e.reason) from e
        except FunctionNotFound as e:  # it was there at the start
            raise NoAnswer(str(e)) from e
        if kind != "answer":
            raise NoAnswer(answer)
        return answer

    @contextmanager
    def _child(self) -> Iterator[_Child]:
        """Borrow a child. A lost child is dropped; the next call starts another."""
        child = self._slots.get()
        try:
            if child is None:
                child = self._start()
            yield child
        except _Lost:
            if child is not None:
                self._drop(child)
            child = None
            self._check_open()
            raise
        finally:
            self._give_back(child)

    def _give_back(self, child: _Child | None) -> None:
        """Return a slot; after `stop`, which ended the idle children, end its child here."""
        with self._lock:
            if not self._stopped:
                self._slots.put(child)
                return
        if child is not None:
            self._drop(child)
        self._slots.put(None)

    def _start(self) -> _Child:
        try:
            return self._starter.submit(self._begin).result()
        except (CancelledError, RuntimeError):  # the starter takes no more
            self._check_open()
            raise

    def _begin(self) -> _Child:
        """Start a child, on the starter's thread: `stop` waits for that one, and then knows all
        children.
        """
        child = _Child(self._folders)
        with self._lock:
            self._children.add(child)
        return child

    def _drop(self, child: _Child) -> None:
        with self._lock:
            self._children.discard(child)
        child.close()

    def _check_open(self) -> None:
        with self._lock:
            if self._stopped:
                raise PoolStopped


class _Lost(Exception):
    """A child gave no answer and must be dropped. reason: TIMEOUT or CRASHED."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class _Child:
    """One child process, asked by one thread at a time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            words = [
                sys.executable,
                "-P",
                "-m",
                "runtime.functions.worker",
                str(theirs.fileno()),
                *map(str, folders),
            ]
            self._process = subprocess.Popen(
                die_with_parent(words),
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._loaded = set[str]()

    def _limit_sending(self, timeout_s: float) -> None:
        """Limit the time of sending: a child that does not read must not block the sender."""
        seconds, rest = divmod(timeout_s, 1)
        limit = struct.pack("@ll", int(seconds), max(1, int(rest * 1e6)))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def load(self, target: str) -> None:
        """Load a function, once. Raises FunctionNotFound or _Lost."""
        if target in self._loaded:
            return
        kind, answer = self.ask(("load", target), LOAD_TIMEOUT_S)
        if kind != "answer":
            raise FunctionNotFound(answer)
        self._loaded.add(target)

    def ask(self, request: tuple[Any, ...], timeout_s: float) -> tuple[str, Any]:
        """Send a request and wait for its answer. Raises _Lost."""
        try:
            self._limit_sending(timeout_s)
            self._connection.send(request)
            if not self._connection.poll(timeout_s):
                raise _Lost(TIMEOUT, f"no answer in {timeout_s:g} s")
            kind, answer = self._connection.recv()
        except BlockingIOError as e:
            raise _Lost(TIMEOUT, f"the request was not read in {timeout_s:g} s") from e
        except (EOFError, OSError) as e:
            self.kill()
            raise _Lost(CRASHED, f"the process ended with exit code {self._process.wait()}") from e
        return kind, answer

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

"""Run users' functions in a few child processes, each call with a time-out.

A user's function may loop, block, crash, eat memory or hold the GIL for minutes. In a child process
this affects only its own call: the child is killed with everything it has started, the call gets no
answer, and the next call gets a new child.

Calls of a function that takes several arguments at once, an async one or one with a batch size, are
sent together when they wait together. When a child is lost or a batch fails, each of the unanswered
calls is tried once more, alone, so that only the call that caused it stays without an answer.

Such a function holds its child until the slowest call ends. It leaves one child to other functions;
a free child goes to the function that holds fewest, then to the call that waits longest.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from clawstream.runtime.functions.child import Child, Lost, Source
from clawstream.runtime.logs import logger
from clawstream.schemas.rule_spec import NoAnswer
from clawstream.schemas.settings import FunctionSettings
from clawstream.schemas.user_function import FunctionNotFound

LATE_S = 5.0
"""How long after its deadline a call is still being given up: its child is killed."""


class PoolStopped(BaseException):
    """The pool was stopped while a call waited.

    Not an Exception: a failed call is an answer that is recorded, the end of the pool is not.
    """


@dataclass(eq=False, slots=True)
class _Call:
    """One argument that waits for its answer. alone: not to be sent beside others."""

    argument: object
    since: float = field(default_factory=time.monotonic)
    alone: bool = False
    answer: Future[Any] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Function:
    """A function of the pool, its waiting calls, and how many children answer others."""

    source: Source
    batch_max: int
    waiting: deque[_Call] = field(default_factory=deque)
    children: int = 0

    def take(self) -> list[_Call]:
        """Remove the calls that are sent together."""
        taken = list[_Call]()
        while self.waiting and len(taken) < self.batch_max:
            if taken and (taken[0].alone or self.waiting[0].alone):
                break
            taken.append(self.waiting.popleft())
        return taken


class FunctionPool:
    """Users' functions as callables that block until a child process answers. Thread-safe."""

    def __init__(self, settings: FunctionSettings) -> None:
        """Nothing is started before the first function is asked for."""
        self._settings = settings
        # The kernel kills a child when the thread that started it ends: one thread starts them all.
        self._starter = ThreadPoolExecutor(1, "function-pool")
        self._threads = ThreadPoolExecutor(settings.processes, "function-calls")
        self._slots: queue.LifoQueue[Child | None] = queue.LifoQueue()
        for _ in range(settings.processes):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._children = set[Child]()
        self._functions = dict[Source, _Function]()
        self._stopped = False

    def find(self, target: str, configuration: str | None = None) -> Callable[[Any], Any]:
        """Return a function after a child has loaded it.

        Calling it returns the answer as plain values, or raises NoAnswer with the reason, or
        PoolStopped.

        Args:
            target: `file.py:function` or `module:function`.
            configuration: JSON with which the target is called to get the function; None: the
                target is the function.

        Raises:
            FunctionNotFound: It cannot be loaded.
        """
        source = Source(target, configuration)
        try:
            with self._child() as child:
                batch_max = child.load(source)
        except Lost as e:
            raise FunctionNotFound(f"loading it: {e}") from e
        with self._lock:
            function = self._functions.setdefault(
                source, _Function(source, min(batch_max, self._settings.concurrency))
            )
        return partial(self._call, function)

    @property
    def in_time(self) -> bool:
        """Whether calls are being answered, each within its time limit."""
        with self._lock:
            deadlines = [child.deadline for child in self._children]
        due = [deadline for deadline in deadlines if deadline is not None]
        return bool(due) and time.monotonic() < min(due) + LATE_S

    def stop(self) -> None:
        """Kill the children.

        Waiting calls raise PoolStopped at once; no further child is started.
        """
        with self._lock:
            self._stopped = True
            waiting = list[_Call]()
            for function in self._functions.values():
                waiting += function.waiting
                function.waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._starter.shutdown(cancel_futures=True)  # waits for the child that is being started
        for call in waiting:
            call.answer.set_exception(PoolStopped())
        with self._lock:
            for child in self._children:
                child.kill()
        idle = list[Child | None]()
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

    def _call(self, function: _Function, argument: object) -> Any:
        call = _Call(argument)
        self._enqueue(function, [call])
        return call.answer.result()

    def _enqueue(self, function: _Function, calls: list[_Call]) -> None:
        """Let the threads answer calls. Raises PoolStopped."""
        with self._lock:
            if self._stopped:
                raise PoolStopped
            function.waiting.extend(calls)
            for _ in calls:  # a thread may answer several of them, or those of another function
                self._threads.submit(self._answer_waiting)

    def _answer_waiting(self) -> None:
        """Answer calls until none waits that may have a child now."""
        while True:
            with self._lock:
                function = self._next()
                if function is None:
                    return
                calls = function.take()
                function.children += 1
            try:
                self._answer_some(function, calls)
            finally:
                with self._lock:
                    function.children -= 1

    def _next(self) -> _Function | None:
        """Return the function whose calls are answered next. Requires the lock."""
        processes = self._settings.processes
        shared = max(1, processes - 1) if len(self._functions) > 1 else processes
        ready = [
            function
            for function in self._functions.values()
            if function.waiting
            and function.children < (processes if function.batch_max == 1 else shared)
        ]
        if self._stopped or not ready:
            return None
        return min(ready, key=lambda function: (function.children, function.waiting[0].since))

    def _answer_some(self, function: _Function, calls: list[_Call]) -> None:
        """Answer calls in one request. After a failure, queue each unanswered call alone."""
        error: BaseException
        try:
            error = NoAnswer(self._answer(function.source, calls))
        except Lost as e:
            logger().warning(
                "function_gave_no_answer",
                function=function.source.target,
                reason=e.reason,
                detail=e.detail,
            )
            error = NoAnswer(e.reason)
        except FunctionNotFound as e:  # it was there at the start
            error = NoAnswer(str(e))
        except BaseException as e:  # noqa: BLE001 - to the callers, who wait for it
            error = e
        left = [call for call in calls if not call.answer.done()]
        if left and isinstance(error, NoAnswer) and len(calls) > 1:
            for call in left:
                call.alone = True
            try:
                self._enqueue(function, left)
                return
            except PoolStopped as e:
                error = e
        for call in left:
            call.answer.set_exception(error)

    def _answer(self, source: Source, calls: list[_Call]) -> str:
        """Send calls to a child and set their answers.

        Returns:
            The reason for calls without an answer, whose batch failed.

        Raises:
            Lost, FunctionNotFound: From the child.
        """
        reason = ""
        with self._child() as child:
            child.load(source)
            arguments = [call.argument for call in calls]
            for index, kind, answer in child.call(source, arguments, self._settings.timeout_s):
                if kind == "answer":
                    calls[index].answer.set_result(answer)
                elif kind == "raised":
                    calls[index].answer.set_exception(NoAnswer(answer))
                else:
                    reason = answer
        return reason

    @contextmanager
    def _child(self) -> Iterator[Child]:
        """Borrow a child.

        After an error it may still have answers to send, which would be taken for those of the next
        call: it is dropped, and the next call starts another.
        """
        child = self._slots.get()
        try:
            if child is None:
                child = self._start()
            yield child
        except FunctionNotFound:  # an answer like others
            raise
        except BaseException:  # whatever ended the call, answers may be unread
            if child is not None:
                self._drop(child)
            child = None
            self._check_open()
            raise
        finally:
            self._give_back(child)

    def _give_back(self, child: Child | None) -> None:
        """Return a slot; after `stop`, which ended the idle children, end its child here."""
        with self._lock:
            if not self._stopped:
                self._slots.put(child)
                return
        if child is not None:
            self._drop(child)
        self._slots.put(None)

    def _start(self) -> Child:
        try:
            return self._starter.submit(self._begin).result()
        except (CancelledError, RuntimeError):  # the starter takes no more
            self._check_open()
            raise

    def _begin(self) -> Child:
        """Start a child, on the starter's thread: `stop` waits for it, and then knows all children.

        Raises:
            MemoryError: The machine has no room for it. That says nothing about the call: the
                process of the job ends and resumes from its position.
        """
        try:
            child = Child(self._settings)
        except OSError as e:
            raise MemoryError(f"a process for functions does not start: {e}") from e
        with self._lock:
            self._children.add(child)
        return child

    def _drop(self, child: Child) -> None:
        with self._lock:
            self._children.discard(child)
        child.close()

    def _check_open(self) -> None:
        with self._lock:
            if self._stopped:
                raise PoolStopped

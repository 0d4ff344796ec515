"""Detects that a client has disconnected while another operation is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from clawstream.gateway.errors import ClientGone

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class DisconnectWatcher:
    """Watches the client of a request whose body was read.

    A disconnect within `async with client:` cancels the block, which then raises ClientGone. Call
    `stop` at the end.
    """

    def __init__(self, receive: Receive) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = self._loop.create_task(_until_disconnect(receive))
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._interrupted = False

    @property
    def gone(self) -> bool:
        """Tell whether the client has disconnected."""
        return self._watch.done()

    def stop(self) -> None:
        """Stop watching. A client inside `async with` is then treated as gone."""
        self._watch.cancel()

    async def __aenter__(self) -> None:
        if self._watch.done():
            raise ClientGone("the client closed its connection")
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task, self._cancelling, self._interrupted = task, task.cancelling(), False
        self._watch.add_done_callback(self._interrupt)

    def _interrupt(self, _: object) -> None:
        if self._task is not None:
            self._interrupted = True
            self._task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.remove_done_callback(self._interrupt)
        task, self._task = self._task, None
        # Like asyncio.timeout: propagate a cancellation from elsewhere unchanged.
        ours = self._interrupted and task is not None and task.uncancel() <= self._cancelling
        if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise ClientGone("the client closed its connection") from error


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

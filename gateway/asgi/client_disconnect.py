"""Noticing that a client has left, while something else is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from gateway.errors import ClientGone

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class DisconnectWatcher:
    """The other end of a request whose body was read. `gone` says whether it has left.

    Inside of `async with client:` leaving cancels the block, which then raises ClientGone. Call `done` at the end.
    """

    def __init__(self, receive: Receive) -> None:
        self._watch = asyncio.create_task(_until_disconnect(receive))
        self._victim: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._fired = False

    @property
    def gone(self) -> bool:
        return self._watch.done()

    def stop(self) -> None:
        """Stop watching; who is served within `async with` then, is left."""
        self._watch.cancel()

    async def __aenter__(self) -> None:
        if self.gone:
            raise ClientGone("the client closed its connection")
        task = asyncio.current_task()
        assert task is not None
        self._victim, self._cancelling, self._fired = task, task.cancelling(), False
        self._watch.add_done_callback(self._interrupt)

    def _interrupt(self, _: object) -> None:
        if self._victim is not None:
            self._fired = True
            self._victim.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.remove_done_callback(self._interrupt)
        victim, self._victim = self._victim, None
        # As asyncio.timeout does it: a cancellation from elsewhere goes on as what it is.
        ours = self._fired and victim is not None and victim.uncancel() <= self._cancelling
        if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise ClientGone("the client closed its connection") from error


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

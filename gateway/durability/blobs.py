"""Records that would be too large for the log: their large fields go to the blob store, before the record goes anywhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gateway.durability.log import Message
from gateway.errors import BlobsUnavailable, RecordTooLarge
from runtime.blob_store import BlobStore, BlobStoreAway
from runtime.process.lifecycle import on_loop
from schemas.blob_refs import Movable, shrink
from schemas.codec.single_object import Codec
from schemas.topics import MAX_MESSAGE_BYTES, MAX_RECORD_BYTES

THREADS = 4
ENVELOPE_BYTES = 64 * 1024
"""What Kafka puts around a value: key, headers, framing."""


class Blobs:
    """Makes messages fit. A store that does not answer is away after timeout_s; it has threads of its own and holds up nothing else.

    Nothing queues behind threads that hang, for it would be held in memory until the store is back: who gets no thread in time
    is told so, and at once when all of them have been in the store for longer than timeout_s.
    """

    def __init__(self, store: BlobStore, codec: Codec, timeout_s: float) -> None:
        self._store, self._codec, self._timeout_s = store, codec, timeout_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="blobs")
        self._free = asyncio.Semaphore(THREADS)
        self._began_at = float("-inf")  # when a thread was last given work

    async def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, each at most MAX_RECORD_BYTES where fields can be moved, with what was moved durable in the store.

        Raises RecordTooLarge for one that Kafka would not take even so, BlobsUnavailable when the store did not take the fields.
        """
        if all(len(m.value) <= MAX_RECORD_BYTES for m in messages):
            return messages
        if self._free.locked() and time.monotonic() - self._began_at >= self._timeout_s:
            raise BlobsUnavailable(
                f"all {THREADS} threads wait for the blob store, for {self._timeout_s:g} s and longer"
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
                return await self._in_thread(messages)
        except TimeoutError as error:
            raise BlobsUnavailable(
                f"the blob store did not take a field within {self._timeout_s:g} s"
            ) from error

    def _in_thread(self, messages: Sequence[Message]) -> asyncio.Future[list[Message]]:
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            on_loop(loop, self._free.release)  # a thread that hung may end behind it

        self._began_at = time.monotonic()
        work = self._threads.submit(self.fit_now, messages)
        work.add_done_callback(
            ended
        )  # when the thread is back, which may be long after its caller was told
        return asyncio.wrap_future(work)

    def fit_now(self, messages: Sequence[Message]) -> list[Message]:
        """As `fit`, blocking and without a limit of time."""
        return [m if len(m.value) <= MAX_RECORD_BYTES else self._shrunk(m) for m in messages]

    def _shrunk(self, message: Message) -> Message:
        record = self._codec.decode(message.value)
        value, outside = message.value, tuple[bytes, ...]()
        if isinstance(record, Movable):
            small, outside = shrink(record, len(value), self._store.url_of)
            value = self._codec.encode(small)
        if len(value) + len(message.key) > MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
            raise RecordTooLarge(
                f"a {type(record).__name__} takes {len(value)} bytes without what can be kept outside"
            )
        try:
            for data in outside:
                self._store.put(data)
        except BlobStoreAway as error:
            raise BlobsUnavailable(str(error)) from error
        return message._replace(value=value)

    def close(self) -> None:
        """Give the threads back; one that hangs in the store is left to itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

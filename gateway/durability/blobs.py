"""Moves the large fields of a record that is too large for Kafka to the blob store, and copies the
images of a request there.

Both are done before the record is sent or spooled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from clawstream.gateway.durability.log import Message
from clawstream.gateway.durability.request_images import images_in, may_hold_images
from clawstream.gateway.errors import BlobsUnavailable, RecordTooLarge, RecordUnfit
from clawstream.runtime.blob_store import BlobStore, BlobStoreAway
from clawstream.runtime.process.lifecycle import on_loop
from clawstream.schemas.blob_refs import Movable, images_of, shrink, with_images
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step
from clawstream.schemas.rule_spec import reason_text
from clawstream.schemas.topics import MAX_MESSAGE_BYTES, MAX_RECORD_BYTES

THREADS = 4
ENVELOPE_BYTES = 64 * 1024
"""Bytes that Kafka adds to a value: key, headers, framing."""


def concerned(message: Message) -> bool:
    """Return whether a message is too large for Kafka or may hold images."""
    return len(message.value) > MAX_RECORD_BYTES or may_hold_images(message.value)


class Blobs:
    """Makes messages fit into Kafka by moving fields to the blob store; copies images there.

    A store that does not answer within timeout_s counts as unavailable. The store has its own
    threads, so it delays nothing else.

    Calls do not queue behind hanging threads: a queued call would stay in memory until the store
    answers. A call that gets no thread within timeout_s fails. It fails at once when all threads
    have been in the store for longer than timeout_s.
    """

    def __init__(self, store: BlobStore, codec: Codec, timeout_s: float) -> None:
        self._store, self._codec, self._timeout_s = store, codec, timeout_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="blobs")
        self._free = asyncio.Semaphore(THREADS)
        self._began_at = float("-inf")  # time of the last start of work in a thread

    async def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Shrink messages to MAX_RECORD_BYTES each, as far as fields can be moved.

        Moved fields and images are durable in the store on return.

        Raises:
            RecordTooLarge: A record is too large for Kafka even without the fields that can move.
            RecordUnfit: A record cannot be read.
            BlobsUnavailable: The store did not accept the fields.
        """
        if not any(map(concerned, messages)):
            return messages
        if self._free.locked() and time.monotonic() - self._began_at >= self._timeout_s:
            raise BlobsUnavailable(
                f"all {THREADS} threads wait for the blob store, "
                f"for {self._timeout_s:g} s and longer"
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
            on_loop(loop, self._free.release)  # a hanging thread may outlive the loop

        self._began_at = time.monotonic()
        work = self._threads.submit(self.fit_now, messages)
        # Runs when the thread ends, possibly long after its caller has got an error.
        work.add_done_callback(ended)
        return asyncio.wrap_future(work)

    def fit_now(self, messages: Sequence[Message]) -> list[Message]:
        """Do the same as `fit`, blocking and without a timeout."""
        return [self._fitted_or_unfit(m) if concerned(m) else m for m in messages]

    def _fitted_or_unfit(self, message: Message) -> Message:
        try:
            return self._fitted(message)
        except (BlobsUnavailable, RecordTooLarge, MemoryError):
            raise
        except Exception as error:
            text = reason_text(error)
            raise RecordUnfit(f"a record was not made to fit: {text}") from error

    def _fitted(self, message: Message) -> Message:
        record = self._codec.decode(message.value)
        value, outside = message.value, list[bytes]()
        if isinstance(record, Step) and (images := _images_to_copy(record)):
            record, copied = with_images(record, images, self._store.url_of)
            outside += copied
            value = self._codec.encode(record)
        if isinstance(record, Movable) and len(value) > MAX_RECORD_BYTES:
            record, moved = shrink(record, len(value), self._store.url_of)
            outside += moved
            value = self._codec.encode(record)
        if len(value) + len(message.key) > MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
            raise RecordTooLarge(
                f"a {type(record).__name__} takes {len(value)} bytes "
                "without what can be kept outside"
            )
        try:
            for data in dict.fromkeys(outside):
                self._store.put(data)
        except BlobStoreAway as error:
            raise BlobsUnavailable(str(error)) from error
        return message._replace(value=value)

    def close(self) -> None:
        """Shut down the threads without waiting for a thread that hangs in the store."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _images_to_copy(step: Step) -> list[bytes]:
    """Return the images that training needs; none of a step without tokens, or copied before."""
    if step.prompt_token_ids is None or images_of(step):
        return []
    return images_in(step.request_json)

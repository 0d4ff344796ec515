"""Hold back partitions whose records have an unknown schema while the schemas topic is read; other
partitions continue.

A lookup takes milliseconds, or as long as the broker is unavailable. It runs on a thread, so
that other partitions, ticks and heartbeats do not wait. A record becomes a dead letter only if
its schema is still unknown after a lookup that began after the record was read: writers announce
a new schema first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from clawstream.runtime.kafka import Record, Unavailable
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import die
from clawstream.runtime.topics.records import Decoder

GIVE_UP_S = 300.0
"""Maximum outage of the schemas topic. Then the process ends; the next one recreates a deleted
topic.
"""
RETRY_S = 1.0


class SchemaWait:
    """Holds the records of waiting partitions.

    process: takes the records of a partition, in order, while `busy` is held. pause: stops
    (True) or resumes (False) fetching a partition, from the first records that arrive while
    others wait; this bounds the waiting records.
    """

    def __init__(
        self,
        decoder: Decoder,
        busy: asyncio.Lock,
        process: Callable[[int, Sequence[Record]], Awaitable[None]],
        pause: Callable[[int, bool], None],
    ) -> None:
        self._decoder, self._busy, self._process, self._pause = decoder, busy, process, pause
        self._thread = ThreadPoolExecutor(
            1, "schemas"
        )  # its own: look-ups that hang must not use up the threads of others
        self._waiting: dict[int, list[Record]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._paused: set[int] = set()
        self._processing: set[asyncio.Task[None]] = set()

    @property
    def holds_records(self) -> bool:
        """Whether a partition waits."""
        return bool(self._waiting)

    def takes(self, partition: int, records: Sequence[Record]) -> bool:
        """Return whether the records must wait: the partition already waits, or a schema is
        unknown. Requires `busy`.
        """
        waiting = self._waiting.get(partition)
        if waiting is not None:
            waiting += records
            if partition not in self._paused:
                self._paused.add(partition)
                self._pause(partition, True)
            return True
        if all(self._decoder.knows(r.value) for r in records):
            return False
        self._waiting[partition] = list(records)
        self._tasks[partition] = asyncio.create_task(self._wait(partition))
        return True

    def drop(self) -> None:
        """Drop waiting records: the partitions are revoked, and the next owner reads them. The
        current batch continues.
        """
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._waiting.clear()
        self._resume(set(self._paused))

    def _resume(self, partitions: set[int]) -> None:
        self._paused -= partitions
        for partition in partitions:
            self._pause(partition, False)

    async def _wait(self, partition: int) -> None:
        """Look schemas up until all waiting records are covered, then process them. Any exception
        ends the process.
        """
        waiting = self._waiting[partition]
        try:
            while True:
                looked = len(waiting)
                await self._look_up(partition)
                async with self._busy:
                    if all(self._decoder.knows(r.value) for r in waiting[looked:]):
                        task = self._tasks.pop(partition)
                        self._processing.add(task)
                        task.add_done_callback(self._processing.discard)
                        del self._waiting[partition]
                        await self._process(partition, waiting)
                        self._resume({partition} & self._paused)
                        return
        except Exception as e:  # noqa: BLE001 - as in `clawstream.stream_jobs.worker.shell`
            die(e)

    async def _look_up(self, partition: int) -> None:
        """Look schemas up. Raises Unavailable after `GIVE_UP_S`."""
        until = time.monotonic() + GIVE_UP_S
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._decoder.look_up
                )
                return
            except Unavailable as e:
                if time.monotonic() > until:
                    raise
                logger().warning(
                    "schemas_unavailable", partition=partition, error=str(e),
                    action="records of an unknown schema wait, "
                    "with all behind them in their partition",
                )  # fmt: skip
            await asyncio.sleep(RETRY_S)

"""Partitions with a record whose schema is not known: their records wait while the schemas topic is read, the others go on.

A look-up takes milliseconds, or as long as the broker of the schemas topic is away. It runs on a thread, so that neither other
partitions nor ticks and heartbeats wait for it. Only a schema that is still unknown behind a look-up that began after its record
was read makes a dead letter: who writes a new schema announces it before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from runtime.kafka import Record, Unavailable
from runtime.logs import logger
from runtime.process.lifecycle import die
from runtime.topics.records import Decoder

GIVE_UP_S = 300.0
"""How long the schemas topic may be away. Then the process ends: the next one makes the topic if somebody has deleted it."""
RETRY_S = 1.0


class SchemaWait:
    """Keeps the records of partitions that wait.

    process: takes the records of a partition, in order, while `busy` is held. pause: stops (True) or starts (False) fetching a
    partition: from the first records on that come while others wait, so that no more wait than were fetched.
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

    def takes(self, partition: int, records: Sequence[Record]) -> bool:
        """Whether the records wait: the partition waits already, or one of them has an unknown schema. To be called with `busy` held."""
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
        """Forget what waits: the partitions are taken away, and who gets them reads it again. A batch in hand goes on."""
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
        """Look schemas up until that was done for all that waits, then process it. Any exception ends the process."""
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
        except Exception as e:  # noqa: BLE001 - as in `stream_jobs.worker.shell`
            die(e)

    async def _look_up(self, partition: int) -> None:
        """Raises Unavailable after `GIVE_UP_S`."""
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
                    action="records of an unknown schema wait, with all behind them in their partition",
                )  # fmt: skip
            await asyncio.sleep(RETRY_S)

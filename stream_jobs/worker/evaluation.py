"""Evaluate on threads, and send the rewards and assessments to Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from clawstream.runtime.functions.pool import FunctionPool
from clawstream.runtime.kafka import Ack, Producer
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Assessment, Reward

T = TypeVar("T")
Results = Sequence[Reward | Assessment]


class Evaluation:
    """The threads of a job that wait for functions in child processes, and its results.

    Attributes:
        evaluated: Number of evaluations so far; their threads count it.

    Args:
        at_once: Number of threads.
        pool: The functions.
        producer: Sends the results; its owner closes it.
        codec: Encodes them.
        topic: `claw.rewards`.
    """

    def __init__(
        self, at_once: int, pool: FunctionPool, producer: Producer, codec: Codec, topic: str
    ) -> None:
        self.evaluated = self._seen = 0
        self._threads = ThreadPoolExecutor(at_once, "evaluation")
        self._pool, self._producer, self._codec, self._topic = pool, producer, codec, topic

    def goes_on(self) -> bool:
        """Return whether evaluations have ended since the last call, or wait for functions whose
        time limit has not passed.
        """
        before, self._seen = self._seen, self.evaluated
        return before != self._seen or self._pool.in_time

    async def run(
        self, items: Sequence[T], evaluate: Callable[[T], Results]
    ) -> list[asyncio.Future[Ack]]:
        """Evaluate items on the threads, and send the results of each when it is done.

        Args:
            items: What is evaluated.
            evaluate: Blocks. Its errors are raised; evaluations that have not begun are cancelled.

        Returns:
            The acknowledgements to wait for.
        """
        loop, acks = asyncio.get_running_loop(), list[asyncio.Future[Ack]]()

        async def evaluate_one(item: T) -> None:
            acks.extend(self.send(await loop.run_in_executor(self._threads, evaluate, item)))

        tasks = [asyncio.ensure_future(evaluate_one(item)) for item in items]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return acks

    def send(self, results: Results) -> list[asyncio.Future[Ack]]:
        """Send results; return their acknowledgements."""
        encode, send = self._codec.encode, self._producer.send_soon
        return [send(self._topic, r.trajectory_key.encode(), encode(r)) for r in results]

    def close(self) -> None:
        """Start no more evaluations. Does not wait for running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)

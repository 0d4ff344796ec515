"""Read the next batch with its payload while one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Protocol, Self

from clawstream.runtime.kafka import Record, Unavailable
from clawstream.runtime.logs import logger
from clawstream.trainer.data.batches import DeadLetterSink, FetchedBatch

POLL_S = 0.2


class BatchSource(Protocol):
    """Where batches come from; `clawstream.trainer.data.batches.BatchReader` is one."""

    def next(self, batch_seq: int, timeout_s: float) -> FetchedBatch | None:
        """Return the next batch, or None when there is none yet; repeatable after Unavailable."""

    def commit(self, before: int | None) -> None:
        """Commit the position of training: an offset, or behind all that was read."""

    def close(self) -> None:
        """Finish."""


class Prefetch:
    """Reads one batch ahead, in a thread. Only that thread uses the source until `close`.

    An error of the source is raised by the call of `next` that asks for its batch, so the batches
    before it are trained and published. While nobody asks for the batch, Kafka may be unavailable:
    the thread reads again. A batch that was read but not trained is in no position: a resume reads
    it again.
    """

    def __init__(
        self, open_source: Callable[[DeadLetterSink], BatchSource], dead_letter: DeadLetterSink
    ) -> None:
        """Open the source; the first call of `next` starts to read.

        Args:
            open_source: gets where the source is to put dead letters.
            dead_letter: writes them, in the thread of the caller.
        """
        self._letters: SimpleQueue[tuple[Record, str, str, str]] = SimpleQueue()
        self._dead_letter = dead_letter
        self._source = open_source(lambda *letter: self._letters.put(letter))
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._stopped = threading.Event()
        self._ahead: Future[FetchedBatch | None] | None = None
        self._waits_for = -1
        """The batch that the caller asks for: all before it are trained."""

    def next(self, batch_seq: int, timeout_s: float) -> FetchedBatch | None:
        """Return the next batch, and begin to read the one after it; None if there is none yet.

        Args:
            batch_seq: its number; all batches before it are trained.
            timeout_s: longest wait.

        Raises:
            Exception: what the source raised for this batch.
        """
        self._waits_for = batch_seq
        if self._ahead is None:
            self._ahead = self._thread.submit(self._read, batch_seq, None)
        done, _ = wait([self._ahead], timeout_s)
        self._write_letters()  # all that came before the batch
        if not done or (fetched := self._ahead.result()) is None:
            return None
        self._ahead = self._thread.submit(self._read, batch_seq + 1, fetched.offset)
        return fetched

    def _read(self, batch_seq: int, training: int | None) -> FetchedBatch | None:
        """Return a batch; None at the end of the block.

        training: offset of the batch that is trained meanwhile.
        """
        if training is not None:
            self._source.commit(training)
        while not self._stopped.is_set():
            waited_for = self._waits_for == batch_seq
            try:
                fetched = self._source.next(batch_seq, POLL_S)
            except Unavailable as e:
                if waited_for:
                    raise
                logger().warning("batch_read_again", batch_seq=batch_seq, error=str(e))
                self._stopped.wait(POLL_S)
                continue
            if fetched is not None:
                return fetched
            if self._waits_for == batch_seq:
                self._source.commit(None)
        return None

    def _write_letters(self) -> None:
        while not self._letters.empty():
            self._dead_letter(*self._letters.get())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the thread end after the poll or the payload that it is reading; wait for nothing."""
        self._stopped.set()

    def close(self) -> None:
        """Wait for the end of the thread, commit the position of training and close the source."""
        self._stopped.set()
        self._thread.shutdown()
        self._write_letters()
        if self._ahead is None or self._ahead.exception() is None:
            fetched = None if self._ahead is None else self._ahead.result()
            self._source.commit(None if fetched is None else fetched.offset)
        self._source.close()

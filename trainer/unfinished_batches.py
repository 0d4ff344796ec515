"""Count in a file how often training of a batch started without ending. Survives the process.

A batch that needs too much memory ends a process, by an error or by the kernel's SIGKILL, and a
restart begins it again. Of several processes one may end, and the others lose it. Other errors are
not counted: while Kafka is unavailable, for example, a batch may start any number of times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawstream.runtime.atomic_file import write_durably
from clawstream.runtime.logs import logger
from clawstream.trainer.errors import BatchNeverEnds, OutOfMemory, ProcessLost
from clawstream.trainer.versions.directory import writing_to

MAX_ATTEMPTS = 5
FILE = "unfinished_batches.json"


class UnfinishedBatches:
    """The counts of one run's batches in training."""

    def __init__(self, directory: Path, topic_id: str) -> None:
        """Read the counts. Those of another topic are forgotten.

        Args:
            directory: of the run's checkpoints.
            topic_id: of the ready batches.
        """
        self._path, self._topic_id = directory / FILE, topic_id
        self._counts: dict[str, int] = {}
        try:
            kept = json.loads(self._path.read_bytes())
            if kept["topic_id"] == topic_id:
                self._counts = {str(seq): int(count) for seq, count in kept["unfinished"].items()}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            logger().warning("unfinished_batches_unreadable", path=str(self._path), error=repr(e))

    @contextmanager
    def training(self, batch_seq: int) -> Iterator[None]:
        """Count the batch as started until the block ends, unless it ends by lack of memory, or by
        the end of another process.

        Raises:
            BatchNeverEnds: it was started MAX_ATTEMPTS times. The count is reset, so the next start
                of the process tries again.
        """
        seq = str(batch_seq)
        count = self._counts.get(seq, 0)
        if count >= MAX_ATTEMPTS:
            self._forget(seq)
            raise BatchNeverEnds(
                f"setting trainer.micro_batch_tokens: the training of batch {batch_seq} was begun "
                f"{count} times and a process was killed or out of memory each time; lower it, "
                "or give the trainer more memory, and start again"
            )
        self._counts[seq] = count + 1
        self._write()
        try:
            yield
        except (OutOfMemory, ProcessLost):
            raise
        except BaseException:  # stopped, or a bug: only a death and lack of memory count
            self._forget(seq)
            raise
        self._forget(seq)

    def _forget(self, seq: str) -> None:
        del self._counts[seq]
        self._write()

    def _write(self) -> None:
        with writing_to(self._path.parent):
            self._write_file()

    def _write_file(self) -> None:
        if self._counts:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"topic_id": self._topic_id, "unfinished": self._counts}
            write_durably(self._path, json.dumps(kept).encode())
        else:
            self._path.unlink(missing_ok=True)

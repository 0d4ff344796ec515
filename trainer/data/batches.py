"""Read ready batches in sequence from the checkpoint's position, without skipping a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from clawstream.runtime.kafka import Cluster, Record, SourceTruncated, Unavailable
from clawstream.runtime.topics.records import Decoder, decode_all
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import Late, PolicyApplied, ReadyBatch, Refused, Trajectory
from clawstream.schemas.settings import Settings
from clawstream.trainer.data.sequences import NO_IMAGES, BatchImages
from clawstream.trainer.data.trajectories import read_payload
from clawstream.trainer.errors import BatchGap, TopicReplaced
from clawstream.trainer.liveness.watchdog import Watchdog
from clawstream.trainer.position import Position
from clawstream.trainer.settings_check import check_named_algorithm

PAYLOAD_S = 120.0
"""Reading the payload of a batch may take this long at least."""
CHECK_INTERVAL_S = 5.0

DeadLetterSink = Callable[[Record, str, str, str], None]
"""A function of (record, topic id, reason, detail)."""
ReadImages = Callable[[ReadyBatch, Mapping[str, Trajectory]], BatchImages]
"""Returns the images of a batch and its payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedBatch:
    """A batch, its payload, and the position that a checkpoint stores after its training.

    record: the batch as it was read.
    """

    batch: ReadyBatch
    record: Record
    trajectories: dict[str, Trajectory]
    position: Position
    read_seconds: float
    images: BatchImages = NO_IMAGES

    @property
    def offset(self) -> int:
        """Of the batch on the ready-batches topic."""
        return self.position.next_offset - 1


def check(
    batch: ReadyBatch, topic: str, offset: int, expected_seq: int, settings: Settings
) -> None:
    """Refuse a batch that this trainer must not train.

    Raises:
        BatchGap: the batch is not the next one.
        SettingsError: the trainer's settings do not fit the batch.
    """
    if batch.batch_seq != expected_seq:
        raise BatchGap(topic, offset, batch.batch_seq, expected_seq)
    if batch.sync_every != (every := settings.admit.policy.sync_every):
        raise SettingsError(
            f"setting admit.policy.sync_every={every}, but batch {batch.batch_seq} of {topic} was "
            f"admitted with sync_every={batch.sync_every}: its staleness was judged by that; set "
            f"admit.policy.sync_every={batch.sync_every}"
        )
    check_named_algorithm(batch.algorithm, settings.trainer)


class BatchReader:
    """Read the ready-batches topic of one run and channel one record at a time.

    The position of training covers all handled records, including control records at the end.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        decoder: Decoder,
        position: Position,
        read_images: ReadImages | None,
        commit: Callable[[int], None],
        watchdog: Watchdog,
        dead_letter: DeadLetterSink,
    ) -> None:
        """Start to read.

        Args:
            cluster, settings, decoder, position: where, and from where on.
            read_images: None for a model without images.
            commit: takes the offset of the first batch that is not trained.
            watchdog: of the thread that reads.
            dead_letter: takes records that are no batches.
        """
        self._read_images, self._commit, self._watchdog = read_images, commit, watchdog
        self._cluster, self._settings, self._decoder = cluster, settings, decoder
        self._dead_letter_sink, self._topic_id = dead_letter, position.topic_id
        topics = settings.kafka.topics
        self.topic = topics.ready_batches(settings.run_id, "train")
        self._trajectories = topics.trajectories
        self._group = f"{topics.prefix}-trainer.{settings.run_id}.train"
        self._reader = cluster.reader(self._group, {(self.topic, 0): position.next_offset})
        self._unread: Record | None = None
        """The batch that was read last, until its payload is read, too."""
        self._checked_at = time.monotonic()

    def next(self, batch_seq: int, timeout_s: float) -> FetchedBatch | None:
        """Return the next batch with its payload, or None when there is none yet.

        Args:
            batch_seq: its number.
            timeout_s: longest wait for the batch.

        Raises:
            BatchGap: its number is not batch_seq.
            Unavailable: Kafka did not answer; the call may be repeated.
        """
        if self._unread is None:
            self._unread = self._poll(timeout_s)
        fetched = None if self._unread is None else self._read(self._unread, batch_seq)
        self._unread = None
        return fetched

    def _poll(self, timeout_s: float) -> Record | None:
        try:
            records = self._reader.poll(1, timeout_s)
        except SourceTruncated:
            with suppress(Unavailable):  # it is not repeated by the next poll
                self._check_topic()
            raise
        if not records:
            self._check_topic_sometimes()
            return None
        return records[0]

    def _read(self, record: Record, batch_seq: int) -> FetchedBatch | None:
        """Return the batch of a record with its payload; None if it is another kind of record."""
        for _, event in decode_all(self._decoder, [record], self._dead_letter):
            match event:
                case ReadyBatch(run_id=self._settings.run_id, channel="train"):
                    return self._with_payload(record, event, batch_seq)
                case Refused() | Late() | PolicyApplied():
                    pass
                case _:
                    self._dead_letter(
                        record,
                        "invalid",
                        f"a {type(event).__name__} that does not belong on {self.topic}",
                    )
        return None

    def _with_payload(self, record: Record, batch: ReadyBatch, batch_seq: int) -> FetchedBatch:
        check(batch, self.topic, record.offset, batch_seq, self._settings)
        began = time.perf_counter()
        with self._watchdog.work("payload", PAYLOAD_S):
            trajectories = read_payload(
                self._cluster, self._decoder, self._trajectories, self._group, batch
            )
            images = self._read_images(batch, trajectories) if self._read_images else NO_IMAGES
        return FetchedBatch(
            batch=batch,
            record=record,
            trajectories=trajectories,
            images=images,
            position=Position(
                topic_id=self._topic_id,
                next_offset=record.offset + 1,
                next_batch_seq=batch_seq + 1,
            ),
            read_seconds=time.perf_counter() - began,
        )

    def commit(self, before: int | None) -> None:
        """Commit the position of training.

        Args:
            before: offset of the first batch that is not trained; None: all that was read with
                its payload is trained.
        """
        (position,) = self._reader.positions.values()
        if before is not None:
            position = before
        elif self._unread is not None:
            position = self._unread.offset
        self._commit(position)

    def _dead_letter(self, record: Record, reason: str, detail: str) -> None:
        self._dead_letter_sink(record, self._topic_id, reason, detail)

    def _check_topic_sometimes(self) -> None:
        now = time.monotonic()
        if now - self._checked_at > CHECK_INTERVAL_S:
            self._checked_at = now
            # The broker is unavailable, so no wrong record can be read either.
            with suppress(Unavailable):
                self._check_topic()

    def _check_topic(self) -> None:
        today = self._cluster.topic_ids([self.topic]).get(self.topic)
        if today != self._topic_id:
            raise TopicReplaced(
                f"{self.topic} had id {self._topic_id} and now has {today}: it was deleted "
                "while it was read"
            )

    def close(self) -> None:
        self._reader.close()

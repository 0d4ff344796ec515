"""Run admission of one channel around the pure fold, by the protocol in `admit.main`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from clawstream.runtime.kafka import Ack, Cluster, KafkaError, Record, SourceTruncated, Unavailable
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.event_time import first_tick_needed
from clawstream.runtime.topics.records import Decoder, dead_letter, reason_of
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import (
    AdmissionPolicy,
    Channel,
    DeadLetter,
    ReadyBatch,
    Refused,
)
from clawstream.schemas.reward_matching import groups_without_reward
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.admit.decisions.checkpoint import CheckpointFile, JournalPosition
from clawstream.stream_jobs.admit.decisions.journal import (
    CandidateLog,
    InputRecord,
    Invalid,
    JournalRecord,
    decode_input,
)
from clawstream.stream_jobs.admit.decisions.metrics import DecisionMetrics
from clawstream.stream_jobs.admit.decisions.recovery import JournalReader
from clawstream.stream_jobs.admit.equal_rewards import EqualRewards
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.admit.policy import Published, is_of_settings, policy_rejection
from clawstream.stream_jobs.admit.run_index import RunFinder
from clawstream.stream_jobs.errors import TopicReplaced

PROCESS = "admit"
POLL_RECORDS = 1000
COMMIT_INTERVAL_S = 0.5
BUDGET_INTERVAL_S = 1.0
CHECK_INTERVAL_S = 5.0
MAX_SEND_RECORDS, MAX_SEND_BYTES = 1000, 32 * 1024 * 1024
"""Records in flight of one transaction, and their bytes. The client accepts 100,000 and 1 GiB."""


class ChannelAdmitter:
    """Run admission of one channel: recover from the journal, read candidates, write decisions."""

    def __init__(
        self,
        settings: Settings,
        channel: Channel,
        cluster: Cluster,
        decoder: Decoder,
        other: ChannelAdmitter | None = None,
        metrics: DecisionMetrics | None = None,
    ) -> None:
        """other: The admitter of the other channel. Both share one reading of the candidates."""
        self._metrics = metrics or DecisionMetrics([channel])
        self._run, self._channel, self._topics = settings.run_id, channel, settings.kafka.topics
        self._cluster, self._decoder = cluster, decoder
        self._name = f"{settings.kafka.topic_prefix}-admit.{self._run}.{channel}"
        self._log = logger().bind(run=self._run, channel=channel)
        # First: it fences every other writer of the journal.
        self._producer = cluster.producer(self._name)
        topic = self._topics.candidates
        partition = partition_of(self._run.encode(), cluster.topics(topic)[topic])
        tickers = cluster.topics(self._topics.steps)[self._topics.steps]
        self._source = CandidateLog(cluster.topic_id(topic), partition, tickers)
        self._at = (topic, partition)
        self._finder: RunFinder = (
            other._finder
            if other is not None
            else RunFinder(cluster, decoder, self._topics, partition)
        )
        path = settings.data_dir / "admit" / f"{self._name}.checkpoint"
        self._checkpoint = CheckpointFile(path, decoder.codec, self._log)
        self._equal_rewards = EqualRewards()
        self._journal = JournalReader(
            cluster, decoder, self._topics.ready_batches(self._run, channel), self._run, channel
        )
        low = cluster.watermarks(topic, [partition])[partition][0]
        recovered = self._journal.recover(
            self._source, low, self._checkpoint, self._topics.weights, self._log
        )
        self.journaled, self.resume_point = recovered.records, recovered.resume_point
        """Number of journal records read, and the state from them and the checkpoint."""
        self._position = recovered.position
        if self.resume_point.state.topic_id is not None and not self.resume_point.renewed:
            for position in (self.resume_point.resume_from, self.resume_point.input_to):
                cluster.check_position(topic, self._source.topic_id, partition, position)
        self._admission = AdmissionFold(self._run, channel, self._source, self.resume_point)
        self._budget = recovered.budget
        self._budget_to, self._budget_at = -1, 0.0
        """Journal offset of the budget that was published last, and when it was last tried."""

    def published(self) -> Published:
        """Return the policies on the log after reading to its end."""
        resume = self.resume_point
        newest, of_settings, here = resume.newest, resume.of_settings, not resume.renewed
        self._finder.read()
        for _, _, event in self._finder.events(self._run, resume.input_to):
            if isinstance(event, AdmissionPolicy) and policy_rejection(event, newest) is None:
                newest, here = event, True
                of_settings = event if is_of_settings(event) else of_settings
        return Published(newest, of_settings, here)

    def open(self) -> None:
        """Start reading at the first undecided record, or earlier if event time needs it."""
        self._finder.read()
        first = self._finder.next_offset(self._run, self.resume_point.resume_from)
        topic, partition = self._at
        low = self._cluster.watermarks(topic, [partition])[partition][0]
        tickers = self._source.tickers
        start = first_tick_needed(
            self._cluster, self._decoder, self._at, low, max(low, first), tickers
        )
        committed = self._cluster.committed(self._name).get(self._at, 0)
        self._dead_lettered_below = 0 if self.resume_point.renewed else committed
        self._reader = self._cluster.reader(self._name, {self._at: start})
        self._committed, self._committed_at = -1, 0.0
        self._checked_at = time.monotonic()
        self._log.info(
            "admission_starts",
            next_batch=self.resume_point.next_seq,
            journal=self.journaled,
            reads_from=start,
            undecided_from=self.resume_point.resume_from,
            decided=len(self.resume_point.state.decisions),
        )
        opening = self._admission.initial_records()
        for dead_letters, position in self._skipped(first):
            if opening or dead_letters:
                self._write(opening, dead_letters, position)
                opening = []
        self._dead_lettered_below = max(self._dead_lettered_below, first)
        self._save_checkpoint()
        self._publish_budget(now=True)

    def _skipped(self, first: int) -> Iterator[tuple[list[DeadLetter], int]]:
        """Yield dead letters for unreadable records below `first`, which are not folded.

        In runs of about MAX_SEND_BYTES, which bounds memory; each with the next offset.
        """
        dead_letters, size = list[DeadLetter](), 0
        resume_from = max(self.resume_point.resume_from, self._dead_lettered_below)
        for record in self._finder.records(
            o for o in self._finder.unattributed if resume_from <= o < first
        ):
            self._entry(record, dead_letters)
            size += len(record.key or b"") + len(record.value or b"")
            if size >= MAX_SEND_BYTES:
                yield dead_letters, record.offset + 1
                dead_letters, size = [], 0
        yield dead_letters, first

    @property
    def position(self) -> int:
        """Next offset of the candidates to fold."""
        return self._reader.positions[self._at]

    @property
    def end(self) -> int:
        """Current end offset of the candidates partition."""
        topic, partition = self._at
        return self._cluster.watermarks(topic, [partition])[partition][1]

    def step(self, timeout_s: float) -> bool:
        """Fold the available records in one transaction; return whether there were any.

        Raises:
            TopicReplaced: The candidates topic was deleted and recreated.
            SourceTruncated: The candidates topic no longer holds the position.
        """
        records = self._poll(timeout_s)
        decisions: list[JournalRecord] = []
        dead_letters: list[DeadLetter] = []
        for record in records:
            entry = self._entry(record, dead_letters)
            for decision in self._admission.fold(entry) if entry is not None else ():
                if isinstance(decision, Invalid):
                    self._dead_letter(record, "invalid", decision.detail, dead_letters)
                else:
                    decisions.append(decision)
        if decisions or dead_letters:
            self._write(decisions, dead_letters, self.position if dead_letters else None)
            self._save_checkpoint()
        self._commit()
        self._publish_budget()
        return bool(records)

    def _poll(self, timeout_s: float) -> list[Record]:
        try:
            records = self._reader.poll(POLL_RECORDS, timeout_s)
        except SourceTruncated:
            self._check_topic()
            raise
        if not records and time.monotonic() - self._checked_at > CHECK_INTERVAL_S:
            self._checked_at = time.monotonic()
            with suppress(Unavailable):  # the next check repeats it
                self._check_topic()
        return records

    def _check_topic(self) -> None:
        """Raise if the topic was recreated: an offset is valid only for one topic id."""
        topic, partition = self._at
        position = self._reader.positions[self._at]
        if not self._cluster.check_position(topic, self._source.topic_id, partition, position):
            raise TopicReplaced(
                f"{topic} had id {self._source.topic_id} and has it no more: it was deleted while "
                "it was read"
            )

    def _entry(self, record: Record, dead_letters: list[DeadLetter]) -> InputRecord | None:
        """Decode a record for the fold. Adds a dead letter and returns None if it is unreadable."""
        try:
            return decode_input(self._decoder, record, self._run)
        except (Undecodable, UnknownSchema) as e:
            self._dead_letter(record, reason_of(e), str(e), dead_letters)
        except ValueError as e:
            self._dead_letter(record, "invalid", str(e), dead_letters)
        return None

    def _dead_letter(
        self, record: Record, reason: str, detail: str, dead_letters: list[DeadLetter]
    ) -> None:
        """Add a dead letter. Both channels read the same log, so only `train` reports, and only
        once.
        """
        if self._channel != "train" or record.offset < self._dead_lettered_below:
            return
        self._log.warning("dead_letter", offset=record.offset, reason=reason, detail=detail)
        dead_letters.append(dead_letter(record, self._source.topic_id, PROCESS, reason, detail))

    def _write(
        self, decisions: list[JournalRecord], dead_letters: list[DeadLetter], position: int | None
    ) -> None:
        """Write one transaction.

        Args:
            position: All dead letters below it are written; None: commits no position.
        """
        encode, key, value, acks = self._decoder.codec.encode, self._run.encode(), b"", list[Ack]()
        journal, limit = self._journal, SendLimit(self._producer.flush)
        with self._producer.transaction():
            for decision in decisions:
                value = encode(decision)
                limit.before(len(value))
                self._producer.put(journal.topic, key, value, partition=0, on_ack=acks.append)
            for letter in dead_letters:
                encoded = encode(letter)
                limit.before(len(encoded))
                self._producer.put(self._topics.dead_letters, letter.key, encoded)
            if position is not None:
                self._producer.commit_positions(self._reader, {self._at: position})
        if acks:
            self._position = JournalPosition.of(journal.id, acks[-1].offset, value)
        for decision, ack in zip(decisions, acks, strict=True):
            self._budget.apply(ack.offset, decision)
            self._metrics.count(self._channel, decision)
            self._log_decision(decision)

    def _log_decision(self, decision: JournalRecord) -> None:
        if (noticed := self._equal_rewards.observe(decision)) is not None:
            self._log.warning(
                "all_groups_zero_variance",
                groups_in_a_row=noticed.in_a_row,
                groups_refused=noticed.refused_groups,
                groups_admitted=noticed.admitted_groups,
                detail=noticed.detail,
                hint="nothing is learned from groups with equal rewards: see docs/admission.md",
            )
        if isinstance(decision, ReadyBatch):
            if self._channel == "train" and (bare := groups_without_reward(decision)):
                self._log.warning(
                    "groups_without_training_reward",
                    batch_seq=decision.batch_seq,
                    groups=len(bare),
                    first=bare[0],
                    of=len(decision.groups),
                    hint="nothing is learned from them: admit.policy.reward_weights names no "
                    "reward that they have",
                )
            self._log.info(
                "batch_admitted", batch_seq=decision.batch_seq, groups=len(decision.groups),
                tokens=decision.trainable_tokens, policy=decision.policy_version,
            )  # fmt: skip
        elif isinstance(decision, Refused):
            group, reason, detail = decision.group_id, decision.reason, decision.detail
            self._log.debug("refused", group=group, reason=reason, detail=detail)

    def _publish_budget(self, now: bool = False) -> None:
        """Publish the rollout budget if it changed, at most every BUDGET_INTERVAL_S unless `now`.

        In a transaction of its own: a fenced admission cannot replace the budget of its successor.
        While Kafka is away the budget waits: a transaction without an answer ends the process.
        """
        budget, due = self._budget, self._budget_at + BUDGET_INTERVAL_S
        if budget.read_to == self._budget_to or (not now and time.monotonic() < due):
            return
        self._budget_at = time.monotonic()
        if not now and not self._kafka_answers():
            return
        key = f"{self._run}.{self._channel}".encode()
        with self._producer.transaction():
            self._producer.put(
                self._topics.budgets, key, self._decoder.codec.encode(budget.budget())
            )
        self._budget_to = budget.read_to

    def _kafka_answers(self) -> bool:
        try:
            self._cluster.ask(BUDGET_INTERVAL_S)
        except Unavailable:
            return False
        return True

    def _save_checkpoint(self) -> None:
        if self._position is not None:
            self._checkpoint.save_if_due(self.resume_point.state, self._position)

    def _commit(self, now: bool = False) -> None:
        position = self._reader.positions[self._at]
        due = time.monotonic() - self._committed_at >= COMMIT_INTERVAL_S
        # A lower commit would move behind the position of a transaction.
        known = max(self.resume_point.input_to, self._dead_lettered_below)
        if (due or now) and position != self._committed and position >= known:
            self._reader.commit({self._at: position})
            self._committed, self._committed_at = position, time.monotonic()

    def close(self) -> None:
        """Commit the position, close the clients, and save a checkpoint. Folded records are
        written.
        """
        self._commit(now=True)
        with suppress(KafkaError):  # the next start publishes it
            self._publish_budget(now=True)
        self._reader.close()
        self._producer.close()
        self._checkpoint.close(self.resume_point.state, self._position)


class SendLimit:
    """Limit the records in flight to the broker: MAX_SEND_RECORDS records and MAX_SEND_BYTES bytes.

    A single larger record is sent alone.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        """Create the limit.

        Args:
            flush: Returns when all records in flight are acknowledged.
        """
        self._flush, self._count, self._bytes = flush, 0, 0

    def before(self, size: int) -> None:
        """Reserve room for a record of `size` bytes; flush first if the limit is reached."""
        if self._count == MAX_SEND_RECORDS or (self._count and self._bytes + size > MAX_SEND_BYTES):
            self._flush()
            self._count = self._bytes = 0
        self._count += 1
        self._bytes += size

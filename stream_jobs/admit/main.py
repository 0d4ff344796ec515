"""Run the admission process: one fenced, journaled fold for each channel of a run.

The journal, its output topic, is its only state.

Protocol of a channel:

1. `init_transactions` of `<prefix>-admit.<run>.<channel>` fences any earlier process and aborts its
   open transaction.
2. Read the journal `ready-batches.<run>.<channel>` to its end. It gives the next batch number, the
   decided trajectories, closed rounds, the policy, and `input_from`, the offset to resume from. A
   checkpoint file (`stream_jobs.admit.decisions.checkpoint`) replaces the part it covers. If the
   candidates topic has another id, start at its beginning and log a warning. If the id is the same
   but the topic ends before the position, stop.
3. Read the candidates from that offset, or from the run's first later record: a new run need not
   fold ticks older than itself. Start early enough for one tick of every source partition, so that
   event time is known. Decided candidates fold to nothing; the rest restores the earlier state.
4. Write the decisions of several records, in log order, in one transaction with their dead letters.
   So all decisions of a step are in the journal, or none.
5. Commit the reader's position after the transaction, as advice. A transaction with dead letters
   commits it inside: below that position a restart writes no dead letters. No process resumes from
   this position.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from runtime.kafka import Ack, Cluster, Record, SourceTruncated, Unavailable
from runtime.logs import logger
from runtime.process.lifecycle import run_sync
from runtime.process.readiness import ready
from runtime.topics.event_time import first_tick_needed
from runtime.topics.records import (
    Decoder,
    cluster_of,
    create_topics,
    dead_letter,
    now_micros,
    reason_of,
)
from schemas.errors import SettingsError, Undecodable, UnknownSchema
from schemas.ids import is_run
from schemas.records import (
    AdmissionPolicy,
    Candidate,
    Channel,
    DeadLetter,
    Place,
    ReadyBatch,
    Refused,
    RunEnded,
    Tick,
)
from schemas.settings import Settings
from schemas.topics import partition_of
from stream_jobs.admit.decisions.checkpoint import CheckpointFile, JournalPosition
from stream_jobs.admit.decisions.journal import (
    CandidateLog,
    Decision,
    InputRecord,
    Invalid,
    JournalRecord,
    decode_journal_record,
)
from stream_jobs.admit.decisions.journal_start import check_complete, check_not_recreated
from stream_jobs.admit.decisions.state import DecisionState, ResumePoint, resume_from_journal
from stream_jobs.admit.equal_rewards import EqualRewards
from stream_jobs.admit.fold import AdmissionFold
from stream_jobs.admit.policy import (
    Published,
    is_of_settings,
    next_policy,
    policy_of,
    policy_rejection,
)
from stream_jobs.admit.policy_log import RunLog
from stream_jobs.errors import PolicyRefused, TopicReplaced

PROCESS = "admit"
POLL_RECORDS = 1000
IDLE_S = 0.05
COMMIT_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 5.0
PUBLISH_ATTEMPTS = 10
MAX_SEND_RECORDS, MAX_SEND_BYTES = 1000, 32 * 1024 * 1024
"""Records of a transaction that are on their way at once, and bytes of them: the client takes
100,000 and 1 GiB.
"""
_PLACE = ("topic_id", "partition", "first_offset", "last_offset")


class ChannelAdmitter:
    """Run admission of one channel: recover from the journal, read candidates, write decisions."""

    def __init__(
        self,
        settings: Settings,
        channel: Channel,
        cluster: Cluster,
        decoder: Decoder,
        other: ChannelAdmitter | None = None,
    ) -> None:
        """other: The admitter of the other channel. Both share one reading of the candidates."""
        self._run, self._channel, self._topics = settings.run_id, channel, settings.kafka.topics
        self._cluster, self._decoder = cluster, decoder
        self._journal_topic = self._topics.ready_batches(self._run, channel)
        self._name = f"{settings.kafka.topic_prefix}-admit.{self._run}.{channel}"
        self._log = logger().bind(run=self._run, channel=channel)
        self._producer = cluster.producer(
            self._name
        )  # first: it fences every other writer of the journal
        topic = self._topics.candidates
        partition = partition_of(self._run.encode(), cluster.topics(topic)[topic])
        tickers = cluster.topics(self._topics.steps)[self._topics.steps]
        self._source = CandidateLog(cluster.topic_id(topic), partition, tickers)
        self._at = (topic, partition)
        self._run_log: RunLog = (
            other._run_log if other is not None else RunLog(cluster, decoder, self._at, self._run)
        )
        low = cluster.watermarks(topic, [partition])[partition][0]
        self._journal_id = cluster.topic_id(self._journal_topic)
        path = settings.data_dir / "admit" / f"{self._name}.checkpoint"
        self._checkpoint = CheckpointFile(path, decoder.codec, self._log)
        self._equal_rewards = EqualRewards()
        self._position: JournalPosition | None = None
        self.journaled, self.resume_point = self._read_journal(low)
        """Number of journal records read, and the state from them and the checkpoint."""
        self._admission = AdmissionFold(self._run, channel, self._source, self.resume_point)

    def _read_journal(self, low: int) -> tuple[int, ResumePoint]:
        check_complete(self._cluster, self._journal_topic)
        state, self._position = self._load_checkpoint()
        count, last = 0, None

        def records() -> Iterable[JournalRecord]:
            nonlocal count, last
            first = None if self._position is None else self._position.offset + 1
            for record in self._cluster.read_all(self._journal_topic, first=first):
                yield decode_journal_record(self._decoder, record)
                count, last = count + 1, record

        resume_point = resume_from_journal(records(), self._source.topic_id, low, state)
        if last is not None:
            self._position = JournalPosition.of(self._journal_id, last.offset, last.value)
        elif self._position is None and self._channel == "train":  # `val` has no staleness gate
            weights = self._topics.weights
            check_not_recreated(
                self._cluster,
                self._decoder,
                weights,
                self._run,
                self._journal_topic,
                self._journal_id,
            )
        topic, partition = self._at
        if resume_point.renewed:
            self._log.warning(
                "candidates_recreated",
                topic=topic,
                topic_id=self._source.topic_id,
                next=resume_point.next_seq,
            )
        elif state.topic_id is not None:
            for position in (resume_point.resume_from, resume_point.input_to):
                self._cluster.check_position(topic, self._source.topic_id, partition, position)
        return count, resume_point

    def _load_checkpoint(self) -> tuple[DecisionState, JournalPosition | None]:
        """Load the checkpoint if the journal still holds the last record that it covers."""
        topic = self._journal_topic
        found = self._checkpoint.load(self._journal_id, self._cluster.watermarks(topic, [0])[0][1])
        if found is not None:
            at = found[1].offset
            there = [
                JournalPosition.of(self._journal_id, r.offset, r.value)
                for r in self._cluster.read_range(topic, 0, at, at)
            ]
            if there == [found[1]]:
                return found
            self._checkpoint.reject(f"the journal has another record at offset {at}")
        return DecisionState(), None

    def published(self) -> Published:
        """Return the policies on the log after reading to its end."""
        newest, of_settings, here = (
            self.resume_point.newest,
            self.resume_point.of_settings,
            not self.resume_point.renewed,
        )
        self._run_log.read(min(self.resume_point.resume_from, self.resume_point.input_to))
        for record, event in self._run_log.events:
            if record.offset < self.resume_point.input_to:
                continue
            if isinstance(event, AdmissionPolicy) and policy_rejection(event, newest) is None:
                newest, here = event, True
                of_settings = event if is_of_settings(event) else of_settings
        return Published(newest, of_settings, here)

    def open(self) -> None:
        """Start reading at the first undecided record, or earlier if event time needs it."""
        self._run_log.read(self.resume_point.resume_from)
        first = self._run_log.next_run_offset(self.resume_point.resume_from)
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
        dead_letters = self._skipped(first)
        if opening or dead_letters:
            self._write(opening, dead_letters, first)
        self._save_checkpoint()

    def _skipped(self, first: int) -> list[DeadLetter]:
        """Return dead letters for unreadable records below `first`, which are not folded."""
        dead_letters: list[DeadLetter] = []
        for record in self._run_log.unattributed:
            if self.resume_point.resume_from <= record.offset < first:
                self._entry(record, dead_letters)
        self._dead_lettered_below = max(self._dead_lettered_below, first)
        return dead_letters

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
            if entry is not None:
                self._sort(self._admission.fold(entry), record, decisions, dead_letters)
        if decisions or dead_letters:
            self._write(decisions, dead_letters, self.position if dead_letters else None)
            self._save_checkpoint()
        self._commit()
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

    def _sort(
        self,
        found: list[Decision],
        record: Record,
        decisions: list[JournalRecord],
        dead_letters: list[DeadLetter],
    ) -> None:
        for decision in found:
            if isinstance(decision, Invalid):
                self._dead_letter(record, "invalid", decision.detail, dead_letters)
            else:
                decisions.append(decision)

    def _entry(self, record: Record, dead_letters: list[DeadLetter]) -> InputRecord | None:
        """Decode a record for the fold; return None for records that it must not see.

        Ignores records of other runs. Adds a dead letter for a record that cannot be read.
        """
        mine = record.key == self._run.encode()
        if not mine and record.key is not None and is_run(record.key):
            return None
        try:
            event = self._decoder.decode(record.value)
            if not isinstance(event, Candidate | AdmissionPolicy | RunEnded | Tick):
                raise ValueError(f"a {type(event).__name__} does not belong on {record.topic}")
            if mine and not isinstance(event, Tick) and event.run_id != self._run:
                raise ValueError(f"key is run {self._run}, record is of run {event.run_id}")
            return InputRecord(
                record.offset,
                event,
                payload_place(record.headers) if isinstance(event, Candidate) else None,
            )
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
        pace = SendLimit(self._producer.flush)
        with self._producer.transaction():
            for number, decision in enumerate(decisions, 1):
                value, on_ack = encode(decision), acks.append if number == len(decisions) else None
                pace.before(len(value))
                self._producer.put(self._journal_topic, key, value, partition=0, on_ack=on_ack)
            for letter in dead_letters:
                said = encode(letter)
                pace.before(len(said))
                self._producer.put(self._topics.dead_letters, letter.key, said)
            if position is not None:
                self._producer.commit_positions(self._reader, {self._at: position})
        if acks:
            self._position = JournalPosition.of(self._journal_id, acks[0].offset, value)
        for decision in decisions:
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
                self._log.info(
                    "batch_admitted", batch_seq=decision.batch_seq, groups=len(decision.groups),
                    tokens=decision.trainable_tokens, policy=decision.policy_version,
                )  # fmt: skip
            elif isinstance(decision, Refused):
                self._log.debug(
                    "refused",
                    group=decision.group_id,
                    reason=decision.reason,
                    detail=decision.detail,
                )

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


def payload_place(headers: Mapping[str, bytes]) -> Place | None:
    """Return the place of a candidate's payload from its headers; None when it has no payload.

    Raises:
        ValueError: The headers are not four complete values.
    """
    if not any(name in headers for name in _PLACE):
        return None
    try:
        topic_id, partition, first, last = (headers[name].decode("ascii") for name in _PLACE)
        return Place(
            topic_id=topic_id,
            partition=int(partition),
            first_offset=int(first),
            last_offset=int(last),
        )
    except (KeyError, ValueError) as e:
        raise ValueError(f"headers {', '.join(_PLACE)}: {e!r} in {dict(headers)}"[:500]) from e


def publish_policy(
    settings: Settings, cluster: Cluster, decoder: Decoder, admitter: ChannelAdmitter
) -> None:
    """Publish the settings' policy if the settings changed since they were last published.

    A policy set by a user meanwhile stays in force until then.

    Raises:
        SettingsError: The settings have another sync_every than the run.
        PolicyRefused: Other writers took the version in every attempt.
    """
    for _ in range(PUBLISH_ATTEMPTS):
        published = admitter.published()
        version = published.newest.policy_version + 1 if published.newest is not None else 1
        policy = policy_of(settings, version, now_micros())
        if published.newest is not None and published.newest.sync_every != policy.sync_every:
            raise SettingsError(
                f"setting admit.policy.sync_every: is {published.newest.sync_every} for the whole "
                f"of run {settings.run_id}, got "
                f"{policy.sync_every}; take another run_id"
            )
        due = next_policy(published, policy)
        if due is None:
            return
        topic, producer = settings.kafka.topics.candidates, cluster.producer()
        producer.put(topic, due.run_id.encode(), decoder.codec.encode(due))
        producer.flush()
        producer.close()
        logger().info(
            "policy_published", run=due.run_id, policy=due.policy_version, by=due.published_by
        )
        # Whoever sets a policy at the same time may have taken the version: then it is said again,
        # with the next one.
    raise PolicyRefused(
        f"others set the policy of run {settings.run_id} at the same time, {PUBLISH_ATTEMPTS} times"
    )


def serve(settings: Settings, stop: threading.Event) -> None:
    """Run admission until `stop` is set.

    Raises:
        Fenced: Another admission of the run and channel has started.
    """
    cluster, topics = cluster_of(settings), settings.kafka.topics
    channels = settings.admit.channels
    create_topics(
        cluster, settings, [topics.ready_batches_spec(settings.run_id, c) for c in channels]
    )
    decoder = Decoder(cluster, topics.schemas)
    admitters = list[ChannelAdmitter]()
    for channel in channels:
        admitters.append(
            ChannelAdmitter(
                settings, channel, cluster, decoder, admitters[0] if admitters else None
            )
        )
    publish_policy(settings, cluster, decoder, admitters[0])
    for admitter in admitters:
        admitter.open()
    ready(f"run {settings.run_id}: {', '.join(channels)}")
    busy = False
    while not stop.is_set():
        timeout_s = 0.0 if busy else IDLE_S / len(admitters)
        busy = sum(admitter.step(timeout_s) for admitter in admitters) > 0
    for admitter in admitters:
        admitter.close()


def main(settings: Settings) -> None:
    """Run the process. Exits with code 78 when another admission of the run has taken over."""
    run_sync(PROCESS, settings, serve)

"""Follow `claw.weights` and the journals of the runs whose budget is requested.

A journal is read from its start on the first request, followed while requests come, and dropped
IDLE_S after the last request. Without requests, nothing is read. One reader serves all journals; it
is recreated at the same positions when their set changes. While Kafka is unreachable, the last
state stays and its age grows. The Kafka client blocks, so it runs in a thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.api.rollout_budget.budget import BudgetReading, BudgetSnapshot, RolloutBudget
from gateway.errors import BudgetUnknown, Overloaded
from runtime.kafka import BEGINNING, Cluster, KafkaError, Reader, Record, SourceTruncated
from runtime.logs import logger
from runtime.process.lifecycle import die, on_loop
from runtime.topics.records import Decoder
from schemas.errors import Undecodable, UnknownSchema
from schemas.records import Channel, Late, PolicyApplied, ReadyBatch, Refused, WeightVersion
from schemas.settings import Settings

MAX_WATCHED = 64
"""Maximum journals followed at the same time."""
IDLE_S = 120.0
"""Seconds that a journal is followed after the last request."""
FIRST_ANSWER_S = 3.0
"""Seconds that the first request waits until its journal is read."""
CHECK_S = 1.0
"""Interval in seconds between checks of which topics exist and whether their ids changed."""
ABSENT_S = 5.0
"""Seconds that a missing journal counts as missing without a new answer of Kafka."""
RETRY_S = 0.5
POLL_RECORDS = 50
QUEUE_KB = 4096


@dataclass(frozen=True, slots=True)
class _Answer:
    """Hold the last state of a journal.

    journal_id None: the journal does not exist. flaw: why its budget is unknown. at: time of the
    last read that reached the end of the journal, in seconds.
    """

    journal_id: str | None
    snapshot: BudgetSnapshot | None
    flaw: str | None
    at: float


@dataclass(slots=True, eq=False)
class _Watch:
    """Follow one journal.

    The event loop owns asked_at and known, the thread the rest; `answer` is replaced as a whole.
    """

    run_id: str
    topic: str
    asked_at: float
    budget: RolloutBudget
    known: asyncio.Event = field(default_factory=asyncio.Event)
    answer: _Answer | None = None
    journal_id: str | None = None
    weights_id: str | None = None
    next: int = BEGINNING
    weights_next: int = BEGINNING
    flaw: str | None = None
    read: bool = False  # read to its end at least once

    def reset(self, journal_id: str | None) -> None:
        """Start over: the topic was recreated or deleted."""
        self.budget, self.journal_id, self.flaw, self.read = (
            RolloutBudget(self.run_id),
            journal_id,
            None,
            False,
        )
        self.next = self.weights_next = BEGINNING

    @property
    def readable(self) -> bool:
        return self.journal_id is not None and self.flaw is None


class BudgetFeed:
    """Implement `gateway.api.rollout_budget.budget.BudgetSource` with Kafka. clock: seconds."""

    def __init__(
        self, cluster: Cluster, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster, self._topics, self._clock = cluster, settings.kafka.topics, clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._watched: dict[str, _Watch] = {}
        self._woken = threading.Event()  # the set of watches changed
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon thread: while Kafka is unreachable, a client call may take longer than a stop
        # should.
        self._thread = threading.Thread(target=self._run, name="budget", daemon=True)

    def start(self) -> None:
        """Start the thread. Call on the event loop that serves requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; wait at most one second."""
        self._stop.set()
        self._woken.set()
        self._thread.join(1.0)

    async def get(self, run_id: str, channel: Channel) -> BudgetReading | None:
        """Return the state of a journal, see BudgetSource.

        Waits at most FIRST_ANSWER_S for a journal that was not followed before.
        """
        watch = self._watch(run_id, channel)
        try:
            async with asyncio.timeout(FIRST_ANSWER_S):
                await watch.known.wait()
        except TimeoutError:
            pass
        answer = watch.answer
        if answer is None:
            raise BudgetUnknown(f"{watch.topic} is being read, or Kafka is away: ask again")
        age_s = max(0.0, self._clock() - answer.at)
        if answer.flaw is not None:
            raise BudgetUnknown(answer.flaw)
        if answer.journal_id is not None and answer.snapshot is not None:
            return BudgetReading(answer.journal_id, answer.snapshot, age_s)
        if age_s > ABSENT_S:
            raise BudgetUnknown(
                f"{watch.topic} was not there {age_s:.0f} s ago, "
                "and Kafka is away since then: ask again"
            )
        return None

    @property
    def following(self) -> int:
        """Return the number of followed journals."""
        return len(self._watched)

    def _watch(self, run_id: str, channel: Channel) -> _Watch:
        topic, now = self._topics.ready_batches(run_id, channel), self._clock()
        with self._lock:
            watch = self._watched.get(topic)
            if watch is None:
                self._make_room(now)
                watch = self._watched[topic] = _Watch(run_id, topic, now, RolloutBudget(run_id))
                self._woken.set()
            watch.asked_at = now
        return watch

    def _make_room(self, now: float) -> None:
        """Drop idle journals; without any, one that does not exist. Raises Overloaded."""
        if len(self._watched) < MAX_WATCHED:
            return
        gone = [w for w in self._watched.values() if now - w.asked_at > IDLE_S]
        absent = (
            w
            for w in self._watched.values()
            if w.answer is not None and w.answer.journal_id is None
        )
        gone = gone or sorted(absent, key=lambda w: w.asked_at)[:1]
        if not gone:
            raise Overloaded(
                f"the budget of {MAX_WATCHED} runs is asked for already; "
                f"one makes room {IDLE_S:.0f} s after its last"
            )
        for watch in gone:
            del self._watched[watch.topic]

    # -- runs in the thread

    def _run(self) -> None:
        try:
            self._keep_following()
        except BaseException as error:  # noqa: BLE001 - a silent end would freeze the answers
            die(error)

    def _keep_following(self) -> None:
        while not self._stop.is_set():
            self._woken.clear()
            watches = self._asked_for()
            if not watches and not self._stop.is_set():
                self._woken.wait()
                continue
            try:
                self._follow(watches)
            except SourceTruncated as error:
                logger().warning("journal_made_anew", error=str(error))
                for watch in watches:
                    watch.reset(None)
                self._stop.wait(RETRY_S)
            except KafkaError as error:
                logger().warning("journals_unreadable", error=str(error))
                self._stop.wait(RETRY_S)

    def _asked_for(self) -> list[_Watch]:
        """Return the recently requested journals, and drop the others."""
        now = self._clock()
        with self._lock:
            self._watched = {t: w for t, w in self._watched.items() if now - w.asked_at <= IDLE_S}
            return list(self._watched.values())

    def _follow(self, watches: Sequence[_Watch]) -> None:
        """Read until the set of watches or of topics changes. Raises KafkaError."""
        self._identify(watches)
        readable = [w for w in watches if w.readable]
        self._publish(set(watches).difference(readable), self._clock())
        if not readable:
            self._woken.wait(CHECK_S)
            return
        decoder = Decoder(self._cluster, self._topics.schemas)
        reader = self._cluster.reader(
            f"{self._topics.prefix}-gateway",
            self._positions(readable),
            queued_max_messages_kbytes=QUEUE_KB,
        )
        try:
            while self._read_for(CHECK_S, reader, decoder, readable):
                now = self._clock()
                if self._identify(watches) or len(self._asked_for()) != len(watches):
                    return
                self._publish(watches if reader.at_end else set(watches).difference(readable), now)
        finally:
            reader.close()

    def _identify(self, watches: Sequence[_Watch]) -> bool:
        """Check which topics exist; return whether any topic id changed.

        The request used here cannot create a topic.
        """
        weights = self._topics.weights
        ids = self._cluster.topic_ids([weights, *(w.topic for w in watches)])
        changed = False
        for watch in watches:
            if watch.journal_id != ids.get(watch.topic):
                watch.reset(ids.get(watch.topic))
                changed = True
            if watch.weights_id != ids.get(weights):
                watch.weights_id, watch.weights_next = ids.get(weights), BEGINNING
                changed = True
        return changed

    def _positions(self, watches: Sequence[_Watch]) -> dict[tuple[str, int], int]:
        start = {(w.topic, 0): w.next for w in watches}
        if watches[0].weights_id is not None:
            start[self._topics.weights, 0] = min(w.weights_next for w in watches)
        return start

    def _read_for(
        self, seconds: float, reader: Reader, decoder: Decoder, watches: Sequence[_Watch]
    ) -> bool:
        """Fold new records for some seconds; return False when the set of watches changed.

        After each poll it waits as long as the poll's records took, because the event loop that
        serves calls shares the interpreter with this thread.
        """
        journals = {w.topic: w for w in watches}
        began = self._clock()
        while self._clock() - began < seconds:
            if self._stop.is_set() or self._woken.is_set():
                return False
            records = reader.poll(POLL_RECORDS)
            polled = time.perf_counter()
            for record in records:
                if record.topic == self._topics.weights:
                    _apply_version(watches, decoder, record)
                else:
                    _apply(journals[record.topic], decoder, record)
                time.sleep(0)  # yield the interpreter to the event loop now instead of after 5 ms
            if any(not w.readable for w in watches):
                return False  # the next round publishes the flaw and stops reading
            if reader.at_end:
                self._publish([w for w in watches if not w.read], began)
            if records:
                for watch in watches:
                    if watch.read and watch.answer is not None:
                        # publishes the new records; the age still counts from the last read to the
                        # end
                        self._hand_over(watch, watch.answer.at)
                self._stop.wait(time.perf_counter() - polled)
        return True

    def _publish(self, watches: Iterable[_Watch], at: float) -> None:
        """Publish the journals that were read to the end or cannot be read.

        at: time when Kafka had no more records.
        """
        for watch in watches:
            watch.read = watch.readable
            self._hand_over(watch, at)

    def _hand_over(self, watch: _Watch, at: float) -> None:
        snapshot = watch.budget.snapshot() if watch.readable else None
        watch.answer = _Answer(watch.journal_id, snapshot, watch.flaw, at)
        if self._loop is not None and not self._stop.is_set():
            on_loop(self._loop, watch.known.set)


def _apply(watch: _Watch, decoder: Decoder, record: Record) -> None:
    """Fold a record of a journal.

    An unreadable record makes the budget unknown, not zero: admission itself stops at such a
    record.
    """
    try:
        event = decoder.decode(record.value)
    except (Undecodable, UnknownSchema) as error:
        watch.flaw = (
            f"{record.topic} offset {record.offset}: {error}. "
            "Admission cannot go on behind it either"
        )
        return
    if watch.flaw is None and isinstance(event, ReadyBatch | Refused | Late | PolicyApplied):
        watch.budget.apply(record.offset, event)
    watch.next = record.offset + 1


def _apply_version(watches: Iterable[_Watch], decoder: Decoder, record: Record) -> None:
    """Fold a record of the weights log.

    An unreadable record is logged and skipped: the trainer and the rollout workers report it.
    """
    version = None
    try:
        version = decoder.decode(record.value)
    except (Undecodable, UnknownSchema) as error:
        logger().warning("version_unreadable", offset=record.offset, error=str(error))
    for watch in watches:
        if record.offset >= watch.weights_next:
            if isinstance(version, WeightVersion):
                watch.budget.apply_version(version)
            watch.weights_next = record.offset + 1

"""Follow `claw.budgets` and `claw.weights`, which give the rollout budget of every run.

Both topics are read from their start: they hold one budget for each run and channel, and one record
for each weight version. While Kafka is unreachable, the last state stays and its age grows. The
Kafka client blocks, so it runs in a thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from clawstream.gateway.api.rollout_budget.budget import BudgetReading
from clawstream.gateway.errors import BudgetUnknown
from clawstream.runtime.kafka import BEGINNING, Cluster, KafkaError, Reader, Record, SourceTruncated
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import die, on_loop
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import Channel, RolloutBudget, WeightVersion
from clawstream.schemas.settings import Settings

FIRST_ANSWER_S = 3.0
"""Seconds that the first requests wait until the topics are read."""
CHECK_S = 1.0
"""Interval in seconds between checks that Kafka answers and the topics are the same."""
ABSENT_S = 5.0
"""Seconds that a missing budget counts as missing without a new answer of Kafka."""
RETRY_S = 0.5
POLL_RECORDS = 50
QUEUE_KB = 4096


@dataclass(slots=True)
class _State:
    """The state that the topics give. The thread writes it, the event loop reads it.

    read_at: When Kafka had no more records, in seconds; None: not read to the end yet.
    """

    budgets: dict[tuple[str, Channel], RolloutBudget] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    read_at: float | None = None

    def apply(self, decoder: Decoder, record: Record) -> None:
        """Apply a record; an unreadable one is logged and skipped.

        After a rollback of the trainer, its newest record gives the current version.
        """
        if record.value is None:
            return
        try:
            event = decoder.decode(record.value)
        except (Undecodable, UnknownSchema) as error:
            logger().warning(
                "budget_unreadable", topic=record.topic, offset=record.offset, error=str(error)
            )
            return
        if isinstance(event, RolloutBudget):
            self.budgets[event.run_id, event.channel] = event
        elif isinstance(event, WeightVersion):
            self.newest[event.run_id] = event.sync_index


class BudgetFeed:
    """Implement `clawstream.gateway.api.rollout_budget.budget.BudgetSource` with Kafka.

    clock: seconds.
    """

    def __init__(
        self, cluster: Cluster, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        topics = settings.kafka.topics
        self._cluster, self._names, self._clock = cluster, (topics.budgets, topics.weights), clock
        self._prefix, self._schemas = topics.prefix, topics.schemas
        self._state, self._known = _State(), asyncio.Event()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon thread: while Kafka is unreachable, a client call may outlast a shutdown.
        self._thread = threading.Thread(target=self._run, name="budgets", daemon=True)

    def start(self) -> None:
        """Start the thread. Call on the event loop that serves requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; wait at most one second."""
        self._stop.set()
        self._thread.join(1.0)

    async def get(self, run_id: str, channel: Channel) -> BudgetReading | None:
        """Return the budget, see BudgetSource. Waits at most FIRST_ANSWER_S for the first state.

        Raises:
            BudgetUnknown: The budgets are not read yet, or Kafka is away and the last reading is
                too old.
        """
        try:
            async with asyncio.timeout(FIRST_ANSWER_S):
                await self._known.wait()
        except TimeoutError:
            raise BudgetUnknown("the budgets are being read, or Kafka is away: ask again") from None
        state = self._state
        age_s = max(0.0, self._clock() - (state.read_at or 0.0))
        budget = state.budgets.get((run_id, channel))
        if budget is not None:
            return BudgetReading(budget, state.newest.get(run_id), age_s)
        if age_s > ABSENT_S:
            raise BudgetUnknown(
                f"run {run_id} had no budget {age_s:.0f} s ago, and Kafka is away since then: "
                "ask again"
            )
        return None

    # -- runs in the thread

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._follow()
                except SourceTruncated as error:
                    logger().warning("budgets_recreated", error=str(error))
                except KafkaError as error:
                    logger().warning("budgets_unreadable", error=str(error))
                self._stop.wait(RETRY_S)
        except BaseException as error:  # noqa: BLE001 - a silent end would freeze the answers
            die(error)

    def _follow(self) -> None:
        """Read from the start until a topic is recreated. Raises KafkaError."""
        ids = self._cluster.topic_ids(self._names)
        decoder, state = Decoder(self._cluster, self._schemas), _State()
        reader = self._cluster.reader(
            f"{self._prefix}-gateway",
            {(name, 0): BEGINNING for name in ids},
            queued_max_messages_kbytes=QUEUE_KB,
        )
        try:
            while len(ids) == len(self._names) and not self._stop.is_set():
                began = self._clock()
                # This request shows that Kafka answers: a reader alone cannot tell that it is away.
                if self._cluster.topic_ids(self._names) != ids:
                    return
                self._read_for(CHECK_S, reader, decoder, state)
                if reader.at_end:
                    state.read_at, self._state = began, state
                    if self._loop is not None:
                        on_loop(self._loop, self._known.set)
        finally:
            reader.close()

    def _read_for(self, seconds: float, reader: Reader, decoder: Decoder, state: _State) -> None:
        """Apply new records for some seconds; the first time, at most to the end of the topics."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stop.is_set():
            for record in reader.poll(POLL_RECORDS):
                state.apply(decoder, record)
                time.sleep(0)  # yield the interpreter to the event loop now instead of after 5 ms
            if state.read_at is None and reader.at_end:
                return

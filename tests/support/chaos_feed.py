"""Agents and environments at a steady rate, in their own process, for fault tests.

The feed produces every irregularity that records can have. Records come twice, at once or much
later; calls are retried; conversations fork; rewards come before their steps, late, revised, for
steps or without a target; steps come after the end; some trajectories never end; some name no
trajectory (anonymous sessions).

The truth file holds one line for each acknowledged record, and no other lines. A record without an
acknowledgement is sent again until it is acknowledged. On SIGTERM, and after enough steps, the feed
completes the open trajectories; then the process ends with 0.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import orjson

from clawstream.runtime.kafka import Cluster, KafkaError
from clawstream.runtime.process.child import die_with_parent
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import anonymous_session_key, new_call_id, new_event_id
from clawstream.schemas.records import Curation, Reward, SessionEvent, Step
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.schemas.topics import Topics

Event = Step | SessionEvent | Reward | Curation
ROOT = Path(__file__).parents[2]
GROUP_SIZE = 4
CHUNK_S = 0.04
NOW_AND_THEN, LONG_AFTER = 60, 1500
"""Number of records between a record and a related, delayed record."""


@dataclass(frozen=True)
class Load:
    """Parameters of the feed.

    steps: minimum number of distinct steps. rate: records per second while they are acknowledged.
    concurrency: number of simultaneous trajectories.
    """

    servers: str
    prefix: str
    run: str
    truth: str
    steps: int
    rate: float
    seed: int
    concurrency: int = 64


class Ack(NamedTuple):
    """A line of the truth file. at: monotonic seconds of the acknowledgement."""

    kind: str
    id: str
    partition: int
    offset: int
    at: float


class Agents:
    """Generate the records.

    `take` returns the next one, or None when all trajectories have ended.
    """

    def __init__(self, run: str, seed: int, concurrency: int) -> None:
        self._run, self._rng, self._concurrency = run, random.Random(seed), concurrency
        self._open: list[Iterator[tuple[int, Event]]] = []
        self._later: list[tuple[int, int, Event]] = []
        self._ties = count()
        self._count = self._groups = 0
        self.steps = 0
        self.more = True

    def take(self) -> Event | None:
        """Return the next record to send."""
        self._count += 1
        while True:
            if self.more and len(self._open) < self._concurrency:
                self._begin()
            if self._later and (self._later[0][0] <= self._count or not self._open):
                return heapq.heappop(self._later)[2]
            if not self._open:
                return None
            at = self._rng.randrange(len(self._open))
            try:
                delay, event = next(self._open[at])
            except StopIteration:
                self._open.pop(at)
                continue
            if self._rng.random() < 0.04:  # a duplicate, sooner or later
                self._put_off(self._rng.choice((1, NOW_AND_THEN, LONG_AFTER)), event)
            if not delay:
                return event
            self._put_off(delay, event)

    def _put_off(self, delay: int, event: Event) -> None:
        heapq.heappush(
            self._later,
            (self._count + self._rng.randrange(delay, 2 * delay), next(self._ties), event),
        )

    def _begin(self) -> None:
        self._groups += 1
        group = f"g{self._groups}-{self._rng.randrange(1 << 32):08x}"
        self._open += [
            self._member(f"{group}-{m}-{self._rng.randrange(1 << 32):x}", group)
            for m in range(GROUP_SIZE)
        ]
        if self._rng.random() < 0.2:
            self._open.append(
                self._anonymous(anonymous_session_key(b"key", b"task %d" % (self._groups // 8)))
            )
        if self._rng.random() < 0.01:
            self._put_off(1, self._reward(f"nobody-{group}", 1.0))

    def _member(self, key: str, group: str) -> Iterator[tuple[int, Event]]:
        """Generate one trajectory and all its records.

        Yields the delay of each record as a number of records; 0 means now.
        """
        rng = self._rng
        gold = str(rng.randrange(2))
        metadata = json.dumps({"gold": gold}).encode()
        yield (
            0,
            self._session(
                key, "opened", group_id=group, group_size=GROUP_SIZE, metadata_json=metadata
            ),
        )
        when = rng.random()  # the reward comes before the steps, at the end, or late
        score = self._reward(key, float(rng.randrange(2)))
        if when < 0.2:
            yield 0, score
        ids, first = [1, 2, 3, rng.randrange(50)], list[int]()
        for turn in range(rng.randrange(1, 7)):
            # A sub-tree: it continues from the first prompt with other words.
            if first and rng.random() < 0.1:
                yield 0, self._step(key, [*first, 60, 61, turn], str(rng.randrange(2)))
            said = [10 + turn, rng.randrange(100), 12]
            step = self._step(key, ids, str(rng.randrange(2)), said)
            yield 0, step
            if rng.random() < 0.05:  # the client did not get the reply and asks again
                yield (
                    0,
                    self._step(
                        key,
                        ids,
                        str(rng.randrange(2)),
                        said,
                        idempotency_key=f"call-{turn}",
                        retry_count=1,
                    ),
                )
            if rng.random() < 0.1:
                yield rng.choice((0, NOW_AND_THEN)), self._reward(key, 0.5, step_id=step.step_id)
            first = first or ids
            ids = [*ids, *said, 7, turn]
        end = rng.random()
        if end < 0.02:
            return  # it never ends and never gets a reward
        yield (
            0,
            self._session(
                key, "failed" if end < 0.07 else "abandoned" if end < 0.09 else "completed"
            ),
        )
        if when >= 0.2:
            yield (0 if when < 0.7 else NOW_AND_THEN if when < 0.95 else LONG_AFTER), score
        if rng.random() < 0.05:
            yield LONG_AFTER, self._reward(key, 1.0, revision=1)
        if rng.random() < 0.03:
            yield NOW_AND_THEN, self._step(key, ids, "late")
        if rng.random() < 0.05:
            yield rng.choice((0, LONG_AFTER)), self._mark(key, rng.random())

    def _anonymous(self, key: str) -> Iterator[tuple[int, Event]]:
        """Generate the conversation of an anonymous session: no record names it or ends it."""
        messages: list[dict[str, str]] = [{"role": "user", "content": "begin"}]
        ids = [5, 6]
        for turn in range(self._rng.randrange(1, 4)):
            said = [20 + turn, self._rng.randrange(1000)]
            step = self._step(
                key, ids, f"reply {said[1]}", said, orjson.dumps({"messages": messages})
            )
            yield 0, step
            messages = [
                *messages,
                {"role": "assistant", "content": f"reply {said[1]}"},
                {"role": "user", "content": f"go on {turn}"},
            ]
            ids = [*ids, *said, 8]
            if self._rng.random() < 0.3:
                yield NOW_AND_THEN, self._reward(key, 1.0, step_id=step.step_id)

    # -- single records

    def _step(
        self, key: str, prompt: list[int], answer: str, said: list[int] | None = None,
        request: bytes = b"{}", **more: Any,
    ) -> Step:  # fmt: skip
        self.steps += 1
        call, response = new_call_id(key), said or [9, len(prompt)]
        return Step(
            step_id=f"{call}.0", run_id=self._run, trajectory_key=key, call_id=call, choice_index=0,
            protocol="openai.chat", model="policy", status="ok", streamed=False,
            request_json=request,
            response_json=json.dumps({"role": "assistant", "content": answer}).encode(),
            prompt_token_ids=pack_ids(prompt), response_token_ids=pack_ids(response),
            response_logprobs=pack_logprobs([-0.5] * len(response)),
            version_first=f"{self._run}/0.0", version_last=f"{self._run}/0.0", gateway_id="g",
            received_at=0, finished_at=0, **more,
        )  # fmt: skip

    def _session(self, key: str, kind: Any, **more: Any) -> SessionEvent:
        return SessionEvent(
            event_id=new_event_id(),
            run_id=self._run,
            trajectory_key=key,
            kind=kind,
            created_at=0,
            **more,
        )

    def _reward(
        self, key: str, value: float, step_id: str | None = None, revision: int = 0
    ) -> Reward:
        return Reward(
            event_id=new_event_id(), run_id=self._run, trajectory_key=key, source="env",
            name="step" if step_id else "score", function_version="1", value=value, step_id=step_id,
            reward_revision=revision, created_at=0,
        )  # fmt: skip

    def _mark(self, key: str, quality: float) -> Curation:
        return Curation(
            event_id=new_event_id(),
            run_id=self._run,
            trajectory_key=key,
            by="test",
            created_at=0,
            quality=quality,
        )


def name_of(event: Event) -> str:
    """Return the identity of a record; duplicates have the same name."""
    return event.step_id if isinstance(event, Step) else event.event_id


async def feed(load: Load, truth: TextIO) -> None:
    """Send all records and write the acknowledged ones to the truth file; see the module."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    agents, codec, topics = (
        Agents(load.run, load.seed, load.concurrency),
        Codec(),
        Topics(load.prefix),
    )
    producer = Cluster(load.servers).producer()
    begun, sent = time.monotonic(), 0
    while True:
        agents.more = agents.steps < load.steps or not stop.is_set()
        chunk = [
            e for _ in range(max(1, round(load.rate * CHUNK_S))) if (e := agents.take()) is not None
        ]
        if not chunk:
            break
        left = chunk
        while left:
            acks = [
                producer.send_soon(
                    topics.rewards if isinstance(e, Reward | Curation) else topics.steps,
                    e.trajectory_key.encode(),
                    codec.encode(e),
                )
                for e in left
            ]
            done, at = await asyncio.gather(*acks, return_exceptions=True), time.monotonic()
            again = []
            for event, ack in zip(left, done, strict=True):
                if isinstance(ack, KafkaError):
                    again.append(event)
                elif isinstance(ack, BaseException):
                    raise ack
                else:
                    kind = type(event).__name__
                    truth.write(f"{kind} {name_of(event)} {ack.partition} {ack.offset} {at:.3f}\n")
            truth.flush()
            left = again
        sent += len(chunk)
        # After an outage the feed continues at its rate and does not catch up.
        begun = max(begun, time.monotonic() - sent / load.rate - 1.0)
        await asyncio.sleep(max(0.0, begun + sent / load.rate - time.monotonic()))
    producer.close()


def main(load: str) -> None:
    """Run the process. load: JSON."""
    wanted = Load(**json.loads(load))
    with Path(wanted.truth).open("w") as truth:
        asyncio.run(feed(wanted, truth))


class Feeder:
    """The feed process, for a test."""

    def __init__(
        self, settings: Settings, home: Path, steps: int, rate: float, seed: int = 1, **load: Any
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.truth = home / "truth"
        self._log = home / "feeder.log"
        made = Load(
            settings.bootstrap_servers, settings.kafka.topic_prefix, settings.run_id,
            str(self.truth), steps, rate, seed, **load
        )  # fmt: skip
        code = "import sys; from support.chaos_feed import main; main(sys.argv[1])"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                die_with_parent([sys.executable, "-c", code, json.dumps(asdict(made))]),
                cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}, stdout=log, stderr=log,
            )  # fmt: skip

    def finish(self, timeout_s: float) -> None:
        """Stop new trajectories with SIGTERM, and wait until all records are acknowledged."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        assert code == 0, f"the feeder ended with {code}:\n{self._log.read_text()[-4000:]}"

    def kill(self) -> None:
        """Kill the feed after a failed test."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def acks(self) -> list[Ack]:
        """Return the records acknowledged so far, in order."""
        lines = self.truth.read_text().splitlines() if self.truth.exists() else []
        whole = [line.split(" ") for line in lines if line.count(" ") == 4]
        return [Ack(kind, name, int(p), int(o), float(at)) for kind, name, p, o, at in whole]


def longest_pause(acks: list[Ack]) -> tuple[float, float]:
    """Return the two consecutive acknowledgements with the longest time between them.

    acks: at least two. Returns the monotonic seconds of both.
    """
    return max(pairwise(a.at for a in acks), key=lambda pair: pair[1] - pair[0])


def longest_pause_s(acks: list[Ack]) -> float:
    """Return the longest time between two acknowledgements; 0 when there are fewer than two."""
    if len(acks) < 2:
        return 0.0
    first, last = longest_pause(acks)
    return last - first

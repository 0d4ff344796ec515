"""The shell around a job: overlapping rebalances, and bounds on memory."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from faust.types import TP

from clawstream.runtime.kafka import NO_METADATA, Cluster, CommitMetadata, Record, Unavailable
from clawstream.runtime.process import readiness
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.single_object import MAGIC, Codec
from clawstream.schemas.records import Tick
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import ConsumerStopped, FencedOut
from clawstream.stream_jobs.worker import shell
from clawstream.stream_jobs.worker.metrics import JobMetrics
from clawstream.stream_jobs.worker.shell import UNASSIGNED_S, Shell


class SchemasTopic:
    """The schemas topic of a broker that does not answer until `back` is set."""

    def __init__(self) -> None:
        self.asked, self.back = threading.Event(), threading.Event()
        self.records: list[Record] = []
        self.questions = 0

    def end(self, topic: str, partition: int) -> int:
        self.questions += 1
        self.asked.set()
        self.back.wait(20)
        return len(self.records)

    def watermarks(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        return {0: (0, len(self.records))}

    def read_all(self, topic: str, first: int) -> list[Record]:
        return self.records[first:]


class Job:
    """A job that records its calls.

    `assigned` waits for `go`, then raises `error` if there is one.
    """

    inputs: tuple[str, ...] = ("s", "r")
    tick_interval_s = 60.0
    well = True

    def __init__(self) -> None:
        self.owned: set[int] = set()
        self.decoder = Decoder(cast(Cluster, SchemasTopic()), "schemas")
        self.processed: asyncio.Queue[tuple[int, list[int]]] = asyncio.Queue()
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        assert not self.owned, "what was owned before was not released"
        self.begun.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        self.owned = set(partitions)
        return {("s", p): 7 for p in partitions}

    async def revoked(self) -> None:
        self.owned = set()

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        self.processed.put_nowait((partition, [r.offset for r in records]))
        return {r.topic: r.offset for r in records}

    def goes_on(self) -> bool:
        return self.well

    async def tick(self) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Group:
    """The part of Faust's consumer that the shell uses."""

    def __init__(self) -> None:
        self.paused: set[TP] = set()
        self.commits: list[Mapping[TP, tuple[int, CommitMetadata]]] = []
        self.positions: dict[TP, int] = {}

    async def commit_with_metadata(self, commits: Mapping[TP, tuple[int, CommitMetadata]]) -> bool:
        self.commits.append(commits)
        return True

    def pause_partitions(self, places: set[TP]) -> None:
        self.paused |= places

    def resume_partitions(self, places: set[TP]) -> None:
        self.paused -= places

    def assignment(self) -> set[TP]:
        return {TP(t, p) for t in Job.inputs for p in (0, 1)}

    def check_group(self) -> None: ...

    async def position(self, tp: TP) -> int | None:
        return self.positions.get(tp)


@pytest.fixture
def died(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Collect errors that would end the process."""
    errors: list[BaseException] = []
    monkeypatch.setattr(shell, "die", errors.append)
    return errors


def fetched(offset: int, value: bytes) -> Any:
    """Return a record as aiokafka returns it."""
    return SimpleNamespace(
        topic="s", partition=0, offset=offset, timestamp=0, key=None, value=value, headers=()
    )


def batch(
    partitions: Mapping[int, Sequence[Any]], generation: int = 1
) -> list[tuple[int, dict[TP, list[Any]]]]:
    return [(generation, {TP("s", p): list(records) for p, records in partitions.items()})]


def shell_of(job: Job, tmp_path: Path, cluster: object = None) -> Any:
    cluster = cast(Cluster, cluster)
    shell: Any = Shell(Settings(data_dir=tmp_path), "test", job, JobMetrics(), cluster)
    shell._app = SimpleNamespace(consumer_generation_id=1, consumer=Group())
    return shell


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, FencedOut("by the other worker")])
def test_a_take_over_that_a_rebalance_overtakes_is_given_up(
    tmp_path: Path, died: list[BaseException], error: Exception | None
) -> None:
    async def main() -> None:
        job = Job()
        shell = shell_of(job, tmp_path)
        taking = asyncio.create_task(shell._assigned())
        await job.begun.wait()
        await shell._revoked()  # the generation is still unknown
        job.error = error
        job.go.set()
        await taking
        assert not job.owned and shell._position(("s", 0)) is None
        shell._app.consumer_generation_id, job.error = 2, None
        await shell._assigned()
        assert job.owned == {0, 1} and shell._position(("s", 0)) == 7
        # Without a revocation in between, the shell first releases the owned partitions.
        await shell._assigned()
        assert job.owned == {0, 1}

    asyncio.run(main())
    assert not died


@pytest.mark.slow
def test_who_is_overtaken_in_no_rebalance_dies(tmp_path: Path, died: list[BaseException]) -> None:
    async def main() -> None:
        job = Job()
        job.go.set()
        job.error = FencedOut("by a stranger")
        await shell_of(job, tmp_path)._assigned()

    asyncio.run(main())
    assert [str(e) for e in died] == ["by a stranger"]


@pytest.mark.slow
def test_behind_a_small_fetch_more_is_waited_for_and_what_came_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "FETCH_PAUSE_S", 3600.0)

    async def main() -> None:
        shell = shell_of(Job(), tmp_path)
        place = TP("s", 0)
        records = [fetched(i, b"v") for i in range(shell._batch_records + 1)]
        small = asyncio.create_task(shell._take({place: records[:1]}))
        assert await shell._fetch_buffer.batch() == [(1, {place: records[:1]})]
        assert not small.done()
        small.cancel()
        await shell._take({place: records[1:]})  # a full batch: more records are waiting

    asyncio.run(main())


POISON, KNOWN = MAGIC + b"12345678", Codec().encode(Tick(partition=0))


def newer_tick() -> tuple[Record, bytes]:
    """Return the announcement of a newer release's schema, and a record of that schema."""
    codec = Codec()
    (published,) = (p for p in codec.published(0) if p.name == "clawstream.Tick")
    schema = json.loads(published.schema_json)
    schema["fields"].append({"name": "colour", "type": "string", "default": ""})
    fingerprint = codec.announce(json.dumps(schema))
    value = codec.encode(
        replace(published, fingerprint=fingerprint, schema_json=json.dumps(schema))
    )
    return Record("schemas", 0, 0, 0, None, value, {}), MAGIC + bytes.fromhex(fingerprint) + KNOWN[
        10:
    ] + b"\x06red"


def test_a_record_of_an_unknown_schema_keeps_no_other_partition_waiting(
    tmp_path: Path, died: list[BaseException]
) -> None:
    """The broker of the schemas topic does not answer.

    Other partitions and ticks continue. Waiting records keep their order and are bounded.
    """
    announcement, newer = newer_tick()

    async def main() -> None:
        job = Job()
        schemas, shell = job.decoder._cluster, shell_of(job, tmp_path)
        assert isinstance(schemas, SchemasTopic)
        await shell._process(
            batch({0: [fetched(0, KNOWN), fetched(1, POISON)], 1: [fetched(0, KNOWN)]})
        )
        assert await job.processed.get() == (1, [0])
        assert await asyncio.to_thread(schemas.asked.wait, 20)
        await shell._process(batch({0: [fetched(2, newer)], 1: [fetched(1, KNOWN)]}))
        assert await job.processed.get() == (1, [1])
        assert shell._app.consumer.paused == {TP("s", 0), TP("r", 0)} and job.processed.empty()
        schemas.records.append(announcement)
        schemas.back.set()
        assert await job.processed.get() == (0, [0, 1, 2])
        async with shell._busy:
            assert not shell._app.consumer.paused and shell._done[TP("s", 0)] == (3, NO_METADATA)
        assert job.decoder.knows(newer) and not job.decoder.knows(POISON)
        assert schemas.questions == 1

    asyncio.run(main())
    assert not died


def test_what_waits_for_a_schema_is_dropped_with_its_partition(
    tmp_path: Path, died: list[BaseException]
) -> None:
    async def main() -> None:
        job = Job()
        schemas, shell = job.decoder._cluster, shell_of(job, tmp_path)
        assert isinstance(schemas, SchemasTopic)
        await shell._process(batch({0: [fetched(0, POISON)]}))
        assert await asyncio.to_thread(schemas.asked.wait, 20)
        await shell._revoked()
        shell._app.consumer_generation_id = 2
        schemas.back.set()
        await shell._process(batch({0: [fetched(0, KNOWN)]}, generation=2))
        assert await job.processed.get() == (0, [0]) and job.processed.empty()

    asyncio.run(main())
    assert not died


class HoldingJob(Job):
    """A job whose position stays behind its first record."""

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        return {"s": 0}


def test_positions_are_committed_again_while_a_batch_goes_on(
    tmp_path: Path, died: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "HEARTBEAT_S", 0.0)

    async def main() -> None:
        job = HoldingJob()
        job.go.set()
        shell = shell_of(job, tmp_path)
        await shell._assigned()
        commits = shell._app.consumer.commits
        begun = {TP("s", 0): (7, NO_METADATA), TP("s", 1): (7, NO_METADATA)}
        assert commits == [begun]
        await shell._commit()
        async with shell._busy:
            await shell._commit()
        assert [tp for tp, (at, said) in commits[1].items() if at == 7 and said.heartbeat_s] == [
            *begun
        ]
        await shell._process(batch({0: [fetched(i, KNOWN) for i in range(3)]}))
        await shell._commit()
        held = CommitMetadata(handled=3)
        assert commits[2:] == [{TP("s", 0): (1, held)}]
        async with shell._busy:
            await shell._commit()
            job.well = False
            await shell._commit()
            job.well = True
            await shell._revoked()
            await shell._commit()
        (last,) = commits[3:]
        assert {tp: (at, said.handled) for tp, (at, said) in last.items()} == {
            TP("s", 0): (1, 3),
            TP("s", 1): (7, None),
        }

    asyncio.run(main())
    assert not died


class Ends:
    """A cluster that tells the ends of partitions, or does not answer."""

    def __init__(self, ends: Mapping[int, int]) -> None:
        self.ends, self.answers = ends, True

    def ask(self, timeout_s: float) -> None:
        if not self.answers:
            raise Unavailable("away")

    def watermarks(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        self.ask(0.0)
        return {p: (0, self.ends[p]) for p in partitions}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Give the shell a clock that the test sets: `now`, in seconds."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(shell, "time", clock)
    return clock


@pytest.mark.slow
def test_a_consumer_that_fetches_nothing_while_records_wait_has_stopped(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    async def stopped_at(until_s: int, ends: Ends) -> float | None:
        clock.now = 0.0
        made = shell_of(Job(), tmp_path, ends)
        made._unassigned_at = None
        made._app.consumer.positions = {TP(t, p): 10 for t in Job.inputs for p in (0, 1)}
        for clock.now in range(until_s):
            try:
                await made._check_consumer()
            except ConsumerStopped:
                return clock.now
        return None

    async def main() -> None:
        behind, away = Ends({0: 10, 1: 11}), Ends({0: 10, 1: 11})
        away.answers = False
        assert await stopped_at(200, behind) == 65
        assert await stopped_at(200, Ends({0: 10, 1: 10})) is None
        assert await stopped_at(200, away) is None

    asyncio.run(main())


@pytest.mark.slow
def test_a_take_over_may_take_any_time(tmp_path: Path, clock: SimpleNamespace) -> None:
    async def main() -> None:
        job = Job()
        made = shell_of(job, tmp_path, Ends({0: 10, 1: 10}))
        taking = asyncio.create_task(made._assigned())
        await job.begun.wait()
        for clock.now in range(0, 1000, 30):
            await made._check_consumer()
        job.go.set()
        await taking
        clock.now += 60
        await made._check_consumer()
        clock.now += 5
        with pytest.raises(ConsumerStopped):
            await made._check_consumer()

    asyncio.run(main())


@pytest.mark.slow
def test_a_consumer_that_gets_no_partitions_while_kafka_answers_has_stopped(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    async def main() -> None:
        ends = Ends({})
        made = shell_of(Job(), tmp_path, ends)
        ends.answers = False
        clock.now = 1000.0
        await made._check_consumer()  # Kafka is away: the consumer has a reason to wait
        ends.answers = True
        clock.now += UNASSIGNED_S - 1
        await made._check_consumer()
        clock.now += 1
        with pytest.raises(ConsumerStopped):
            await made._check_consumer()

    asyncio.run(main())


@pytest.mark.slow
def test_a_worker_without_partitions_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.setblocking(False)
        monkeypatch.setenv(readiness.VARIABLE, str(tmp_path / "notify"))

        async def main() -> list[bytes]:
            job = Job()
            job.go.set()
            made = shell_of(job, tmp_path)
            said = []
            for event in (made._assigned, made._revoked, made._assigned):
                await event()
                said.append(told.recv(4096).splitlines()[0])
            made._stopping = True
            await made._revoked()
            with pytest.raises(BlockingIOError):
                told.recv(4096)
            return said

        assert asyncio.run(main()) == [b"READY=1", b"RELOADING=1", b"READY=1"]

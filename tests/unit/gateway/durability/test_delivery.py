"""Delivery to Kafka and the spool: order per key, cancelled callers, segments too old to send."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.log_producer import InMemoryLogProducer
from support.spool import (
    append,
    delivery,
    drain,
    files,
    note,
    open_spool,
    records_in,
    sample,
    size_of,
    wait_for,
)

from clawstream.gateway.durability.blobs import Blobs
from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.log import LogPosition, Message, Passed
from clawstream.gateway.durability.segment import read_segment, sync_of
from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.durability.spool_drainer import RETRY_S
from clawstream.gateway.durability.spool_frames import SYNC_BYTES, scan
from clawstream.gateway.errors import NoRoom, NotRecorded, SpoolFailed, SpoolFull
from clawstream.gateway.metrics import Metrics
from clawstream.runtime.blob_store import BlobStore
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.topics import MAX_RECORD_BYTES


def test_a_key_in_the_spool_goes_on_in_the_spool(tmp_path: Path) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.acknowledges = False
        assert await it.record([note(1)]) == "spooled"
        # Kafka accepts records again, but the drain has not run yet: the key must keep its order.
        producer.acknowledges = True
        assert await it.record([note(2)]) == "spooled"
        assert await it.record([note(3, b"other")]) == "acknowledged"

    producer = delivery(tmp_path, body)
    assert [m for m in producer.messages if m.key == b"k"] == [note(1), note(2)]
    assert note(3, b"other") in producer.messages


def test_a_write_whose_fields_cannot_be_moved_fails_and_others_go_on(tmp_path: Path) -> None:
    """A record that cannot be read cannot be made to fit; its caller must not wait for ever."""

    async def run() -> None:
        producer, spool = InMemoryLogProducer(), Spool(tmp_path / "spool", 1 << 20, 200)
        blobs = Blobs(BlobStore(str(tmp_path / "blobs")), Codec(), 30.0)
        it = DeliveryManager(producer, spool, Metrics(), blobs=blobs)
        await it.start()
        unreadable = Message("t", b"k", b"x" * (MAX_RECORD_BYTES + 1))
        async with asyncio.timeout(20):
            first, second, last = await asyncio.gather(
                *(it.record([m]) for m in (unreadable, unreadable, note(1))), return_exceptions=True
            )
            for error in (first, second):
                assert isinstance(error, NotRecorded) and "not made to fit" in str(error)
            assert last == "acknowledged" and producer.messages == [note(1)]
            await it.close()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_order_of_each_key_holds_while_kafka_comes_and_goes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    answered: dict[bytes, list[Message]] = {b"a": [], b"b": [], b"c": []}

    async def agent(it: DeliveryManager, key: bytes) -> None:
        for i in range(60):
            await it.record([note(i, key)])
            answered[key].append(note(i, key))
            await asyncio.sleep(rng.random() / 200)

    async def weather(producer: InMemoryLogProducer) -> None:
        while True:
            await asyncio.sleep(rng.random() / 50)
            producer.reachable = rng.random() < 0.6
            producer.acknowledges = rng.random() < 0.6

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        outside = asyncio.create_task(weather(producer))
        await asyncio.gather(*(agent(it, key) for key in answered))
        outside.cancel()
        producer.reachable = producer.acknowledges = True

    producer = delivery(tmp_path, body)
    for key, wanted in answered.items():
        assert [m for m in producer.messages if m.key == key] == wanted


def test_what_an_earlier_process_left_comes_first(tmp_path: Path) -> None:
    async def before(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        await it.record([note(1), note(2)])

    async def after(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        await it.record([note(3)])

    assert delivery(tmp_path, before).messages == []
    assert delivery(tmp_path, after).messages == [note(1), note(2), note(3)]


def test_many_at_once_share_few_fsyncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsyncs: list[int] = []
    fsync = os.fsync

    def counted(fd: int) -> None:
        fsyncs.append(fd)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        await asyncio.gather(*(it.record([note(i)]) for i in range(100)))
        producer.reachable = True

    producer = delivery(tmp_path, body)
    assert producer.messages == [note(i) for i in range(100)]
    assert len(fsyncs) < 20


def test_full_spool_refuses_only_what_does_not_fit(tmp_path: Path) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        # Kafka was never reachable, so a segment contains only its records.
        producer.reachable, producer.position = False, None
        with it.reserve(50), pytest.raises(NoRoom), it.reserve(51):
            pass
        with it.reserve(100):
            pass
        await it.record([note(1)])
        with pytest.raises(NotRecorded):
            await it.record([Message("t", b"k", b"x" * 200)])
        await it.record([note(2)])
        assert it.spooled_keys == 1 and it.spooled_bytes == 2 * size_of(note(1))
        producer.reachable = True

    assert delivery(tmp_path, body, max_bytes=100).messages == [note(1), note(2)]


def test_a_record_that_kafka_never_takes_is_rejected(tmp_path: Path) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        await it.record([note(1)])
        await it.record([Message("t", b"k", b"x" * 200)])
        await it.record([note(2)])
        producer.max_bytes = 100
        producer.reachable = True

    assert delivery(tmp_path, body).messages == [note(1), note(2)]
    rejected = (tmp_path / "rejected").read_bytes()
    assert scan(rejected, rejected[:SYNC_BYTES]).messages == [Message("t", b"k", b"x" * 200)]


def test_a_record_that_cannot_be_read_is_rejected_and_the_next_ones_are_sent(
    tmp_path: Path,
) -> None:
    """Blobs read a record that may hold an image; an older release has another schema."""
    unreadable = Message("t", b"k", b'image;base64, of an "unknown" schema')
    blobs = Blobs(BlobStore(str(tmp_path / "blobs")), Codec(), 30.0)
    for message in (note(1), unreadable, note(2)):
        spool = open_spool(tmp_path)
        append(spool, message)
        spool.close()

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        await wait_for(lambda: not it.spooled_bytes)

    assert delivery(tmp_path, body, blobs=blobs).messages == [note(1), note(2)]
    rejected = (tmp_path / "rejected").read_bytes()
    assert scan(rejected, rejected[:SYNC_BYTES]).messages == [unreadable]


def test_a_drain_sends_only_what_is_not_acknowledged_again_and_ever_more_rarely(
    tmp_path: Path,
) -> None:
    spooled = [note(n, key) for n, key in enumerate((b"a", b"b", b"a", b"c", b"b", b"c"))]
    pauses: list[float] = []

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        for message in spooled:
            await it.record([message])
        producer.refused = {b"b"}
        with capture_logs() as logs:
            producer.reachable = True
            await wait_for(lambda: len(producer.sent) > 8)
        pauses.extend(line["seconds"] for line in logs if line["event"] == "spool_drain_waits")
        producer.refused = set()
        await wait_for(lambda: not it.spooled_bytes)

    producer = delivery(tmp_path, body)
    b = [m for m in spooled if m.key == b"b"]
    assert producer.sent == [*spooled, *b, *b, *b][: len(producer.sent)]
    assert [m for m in producer.messages if m.key == b"b"] == b
    assert sorted(producer.messages) == sorted(spooled)
    assert pauses[:2] == [RETRY_S, 2 * RETRY_S]


def test_a_key_keeps_its_order_when_a_later_record_is_acknowledged_first(tmp_path: Path) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        for message in (Message("t", b"k", b"x" * 300), note(2)):
            await it.record([message])
        producer.too_slow = 200  # bytes
        producer.reachable = True
        await wait_for(lambda: note(2) in producer.messages)
        producer.too_slow = None
        await wait_for(lambda: not it.spooled_bytes)

    messages = delivery(tmp_path, body).messages
    assert messages == [note(2), Message("t", b"k", b"x" * 300), note(2)]


def test_files_that_are_no_segments_are_left_alone_and_named(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "quarantined", tmp_path / "damaged"):
        directory.mkdir(exist_ok=True)
        (directory / "backup.spool").write_bytes(b"of the operator")
        (directory / "000000000009-0011.spool").write_bytes(b"no marker")

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        await it.record([note(1)])
        producer.reachable = True

    with capture_logs() as logs:
        assert delivery(tmp_path, body).messages == [note(1)]
    (told,) = [line for line in logs if line["event"] == "spool_foreign_files"]
    assert told["names"] == ["000000000009-0011.spool", "backup.spool"]
    assert len(list(tmp_path.rglob("*.spool"))) == 6


def test_a_call_asks_the_disk_for_no_list_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", None)
            with it.reserve(100):
                assert await it.record([note(1)]) == "spooled"
        producer.reachable = True

    assert delivery(tmp_path, body).messages == [note(1)]


@pytest.mark.parametrize("there", [True, False])
def test_no_records_are_recorded_at_once(tmp_path: Path, there: bool) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = producer.acknowledges = there
        assert await it.record([]) == "acknowledged"
        assert not spool.segments and not files(tmp_path)

    assert delivery(tmp_path, body).messages == []


@pytest.mark.parametrize("fails", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO])
def test_a_first_write_that_fails_leaves_no_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, code: int
) -> None:
    def broken(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        with monkeypatch.context() as patch:
            patch.setattr(os, fails, broken)
            with pytest.raises(SpoolFailed):
                await it.record([note(1)])
        assert not spool.segments and not files(tmp_path)
        assert await it.record([note(2, b"2")]) == "spooled"
        producer.reachable = True

    assert delivery(tmp_path, body).messages == [note(2, b"2")]


def test_what_was_begun_goes_on_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.gate.clear()
        for n in (1, 2):  # the second record is not acknowledged
            caller = asyncio.create_task(it.record([note(n, b"%d" % n)]))
            await asyncio.sleep(0)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            if n == 1:
                producer.gate.set()
                await wait_for(lambda: producer.messages)
                producer.gate.clear()
        producer.acknowledges = False
        producer.gate.set()
        while not it.spooled_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        producer.acknowledges = True

    assert delivery(tmp_path, body).messages == [note(1, b"1"), note(2, b"2")]


class At:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def lives(
    directory: Path,
    clock: At,
    producer: InMemoryLogProducer,
    *bodies: Callable[[DeliveryManager], Awaitable[None]],
) -> Metrics:
    """Run processes one after the other over one spool: start, run a body, close.

    Returns:
        The metrics of the last process.
    """

    async def run() -> Metrics:
        metrics = Metrics()
        for body in bodies:
            metrics = Metrics()
            spool = Spool(directory, 10_000, now=clock)
            it = DeliveryManager(producer, spool, metrics, max_behind=100, max_age_s=3600)
            await it.start()
            await body(it)
            await it.close()
        return metrics

    return asyncio.run(run())


def quarantined(directory: Path) -> list[Message]:
    return [
        m for path in sorted((directory / "quarantined").glob("*.spool")) for m in records_in(path)
    ]


@pytest.mark.parametrize(
    ("log_s", "others", "was_sent", "sent_by_itself"),
    [
        (3600.0, 100, True, True),
        (600.0, 101, True, False),  # the lake may have dropped the id of a possible copy
        (600.0, 10**6, False, True),  # there is no copy
        (3601.0, 0, False, False),  # its trajectories are closed or dropped
    ],
)
def test_a_segment_that_is_too_old_by_the_log_is_quarantined(
    tmp_path: Path, log_s: float, others: int, was_sent: bool, sent_by_itself: bool
) -> None:
    clock, producer = At(), InMemoryLogProducer()

    async def before(it: DeliveryManager) -> None:
        producer.reachable, producer.acknowledges = was_sent, False
        await it.record([note(1)])
        producer.reachable = False

    async def after(it: DeliveryManager) -> None:
        producer.reachable = producer.acknowledges = True
        producer.passed = Passed(others, log_s)
        await wait_for(lambda: not it.spooled_keys)  # the file moves before, in a thread
        assert await it.record([note(2)]) == "acknowledged", "a quarantined segment delays nothing"

    metrics = lives(tmp_path, clock, producer, before, after)
    assert producer.messages == ([note(1), note(2)] if sent_by_itself else [note(2)])
    assert quarantined(tmp_path) == ([] if sent_by_itself else [note(1)])
    assert (sample(metrics, "spool_quarantined_bytes") == 0) == sent_by_itself


@pytest.mark.parametrize("restarted", [True, False])
def test_however_long_kafka_was_away_and_whatever_a_clock_did_meanwhile_all_of_the_spool_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    clock, producer = At(), InMemoryLogProducer()

    async def before(it: DeliveryManager) -> None:
        producer.reachable = False
        await it.record([note(1)])
        if not restarted:
            await after(it)

    async def after(it: DeliveryManager) -> None:
        # The machine's clock is corrected by decades.
        monkeypatch.setattr("time.time", lambda: 4e9)
        clock.now += 10**6  # Kafka was unreachable for days
        producer.passed = Passed(3, 0.1)  # the topic has just begun to receive records again
        producer.reachable = True
        await wait_for(lambda: not it.spooled_keys)

    lives(tmp_path, clock, producer, before, *([after] if restarted else []))
    assert producer.messages == [note(1)] and quarantined(tmp_path) == []


def test_a_jump_of_the_brokers_clock_does_not_make_a_segment_older_than_the_time_that_has_passed(
    tmp_path: Path,
) -> None:
    clock, producer = At(), InMemoryLogProducer()

    async def body(it: DeliveryManager) -> None:
        producer.reachable = False
        await it.record([note(1)])
        clock.now += 60
        producer.passed = Passed(3, 86400.0)
        producer.reachable = True
        await wait_for(lambda: not it.spooled_keys)

    lives(tmp_path, clock, producer, body)
    assert producer.messages == [note(1)] and quarantined(tmp_path) == []


def test_a_segment_without_a_position_is_quarantined_only_if_it_may_have_been_sent(
    tmp_path: Path,
) -> None:
    clock, producer = At(), InMemoryLogProducer()

    async def before(it: DeliveryManager) -> None:
        producer.position, producer.reachable = None, False  # Kafka was never reachable
        await it.record([note(1)])

    async def within(it: DeliveryManager) -> None:
        producer.gate.clear()
        producer.position, producer.reachable = LogPosition("memory", (0,)), True
        await wait_for(lambda: list(tmp_path.glob("*-sent.spool")))
        producer.reachable = False  # the process ends: it is unknown which records arrived
        producer.gate.set()

    lives(tmp_path, clock, producer, before, within)
    (path,) = tmp_path.glob("*-sent.spool")
    assert read_segment(path).position == LogPosition("memory", (0,)), (
        "known from when it was sent first"
    )

    async def after(it: DeliveryManager) -> None:
        producer.reachable = True
        await wait_for(lambda: not it.spooled_keys)

    path.write_bytes(path.read_bytes()[: size_of(note(1))])  # the disk loses the position
    lives(tmp_path, clock, producer, after)
    assert producer.messages == [] and quarantined(tmp_path) == [note(1)]


def test_what_was_quarantined_counts_within_the_bound_until_it_is_taken_away(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path, 2 * size_of(note(1)))
    spool.open()
    append(spool, note(1))
    path = spool.quarantine(spool.segments[0])
    append(spool, note(2))
    with pytest.raises(SpoolFull):
        append(spool, note(3))
    path.unlink()
    spool.count()
    append(spool, note(3))
    assert drain(spool) == [note(2), note(3)]
    spool.close()


def test_a_segment_that_vanishes_while_sizes_are_summed_hides_no_other(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10_000)
    spool.open()
    append(spool, note(1))
    path = spool.quarantine(spool.segments[0])
    for n in range(8):  # like a removed file, a link without a target is listed and has no size
        (path.parent / f"{n}.spool").symlink_to(tmp_path / "nothing")
    spool.count()
    assert spool.quarantined_bytes == path.stat().st_size
    spool.close()


def test_numbers_are_never_used_again_while_a_segment_has_them(tmp_path: Path) -> None:
    for n in range(3):
        spool = Spool(tmp_path, 10_000)
        spool.open()
        append(spool, note(n))
        spool.quarantine(spool.segments[0])
        spool.close()
    assert quarantined(tmp_path) == [note(0), note(1), note(2)]


def test_a_drain_that_was_cut_short_marks_what_it_may_have_sent(tmp_path: Path) -> None:
    clock, producer = At(), InMemoryLogProducer()

    async def before(it: DeliveryManager) -> None:
        producer.reachable = False
        await it.record([note(1)])

    async def within(it: DeliveryManager) -> None:
        producer.gate.clear()
        producer.reachable = True
        await wait_for(lambda: list(tmp_path.glob("*-sent.spool")))
        producer.reachable = False  # the process ends: it is unknown which records arrived
        producer.gate.set()

    lives(tmp_path, clock, producer, before, within)
    assert [m for path in tmp_path.glob("*-sent.spool") for m in records_in(path)] == [note(1)]


def test_what_may_be_sent_is_marked_for_good_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record the durable file names at each durable write.

    A name is durable after the fsync of its directory.
    """
    durable: set[str] = set()
    seen: list[tuple[set[str], int]] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        nonlocal durable
        fsync(fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            durable = {path.name for path in tmp_path.glob("*.spool")}
        else:
            seen.append((durable, os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", watched)
    spool, size = Spool(tmp_path, 10_000), size_of(note(1))
    spool.open()
    spool.append([note(1)])
    spool.append([note(2)], maybe_sent=True)
    spool.seal()
    spool.append([note(3)], maybe_sent=True)
    sync = sync_of(spool.segments[0].path).hex()
    first, second = f"000000000001-{sync}", f"000000000002-{sync}-sent.spool"
    assert seen == [({f"{first}.spool"}, size), ({f"{first}-sent.spool"}, 2 * size),
                    ({f"{first}-sent.spool", second}, size)]  # fmt: skip
    spool.seal()
    spool.append([note(4)])
    spool.mark_sent(spool.segments[2])
    assert f"000000000003-{sync}-sent.spool" in durable
    spool.close()


def test_what_can_not_be_marked_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    spool = open_spool(tmp_path)
    append(spool, note(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", broken)
        with pytest.raises(SpoolFailed):
            spool.append([note(2)], maybe_sent=True)
    append(spool, note(3))
    assert drain(spool) == [note(1), note(3)]
    spool.close()


def test_a_drain_waits_until_it_can_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def broken(*names: object) -> None:
        tries.append(names)
        raise OSError(errno.EIO, "Input/output error")

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        await it.record([note(1)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", broken)
            producer.reachable = True
            await wait_for(lambda: len(tries) == 2)
            assert producer.messages == []
        await wait_for(lambda: not it.spooled_bytes)

    assert delivery(tmp_path, body).messages == [note(1)]

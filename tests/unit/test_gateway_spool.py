"""Spool and journal: what was promised survives, in order, within bounds."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bus import MemoryBus, Message
from gateway.errors import NoRoom, NotRecorded, SpoolFailed, SpoolFull
from gateway.journal import Journal
from gateway.metrics import Metrics
from gateway.spool import DISK_RESERVE_BYTES, Spool, frame, frames

messages = st.builds(Message, st.text(max_size=20), st.binary(max_size=30), st.binary(max_size=200))


def note(n: int, key: bytes = b"k") -> Message:
    return Message("t", key, b"%d" % n)


@given(st.lists(messages, max_size=8), st.binary(max_size=40))
def test_frames_round_trip_and_a_tail_that_is_no_frame_ends_them(items: list[Message], tail: bytes) -> None:
    data = b"".join(map(frame, items))
    read = [m for m, _ in frames(data + tail)]
    assert read[: len(items)] == items


@given(st.lists(messages, min_size=1, max_size=6), st.data())
def test_cut_anywhere_leaves_exactly_the_whole_frames(items: list[Message], data: st.DataObject) -> None:
    whole = b"".join(map(frame, items))
    cut = data.draw(st.integers(0, len(whole)))
    ends = [sum(len(frame(m)) for m in items[: i + 1]) for i in range(len(items))]
    read = list(frames(whole[:cut]))
    assert [m for m, _ in read] == items[: sum(e <= cut for e in ends)]
    assert [e for _, e in read] == [e for e in ends if e <= cut]


@given(st.lists(messages, min_size=1, max_size=4), st.data())
def test_a_flipped_bit_ends_the_frames_there(items: list[Message], data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(frame, items)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    read = [m for m, _ in frames(bytes(whole))]
    intact = sum(sum(len(frame(m)) for m in items[: i + 1]) <= at for i in range(len(items)))
    assert read[:intact] == items[:intact] and len(read) <= len(items)
    assert read == items[: len(read)]


def open_spool(directory: Path, max_bytes: int = 1 << 20, segment_bytes: int = 200) -> Spool:
    spool = Spool(directory, max_bytes, segment_bytes)
    spool.open()
    return spool


def append(spool: Spool, *items: Message) -> None:
    spool.append([frame(m) for m in items])
    spool.count(m.key for m in items)


def drain(spool: Spool) -> list[Message]:
    out = []
    while (found := spool.first()) is not None:
        out += found[1]
        spool.remove(found[0])
    return out


def test_a_crash_keeps_everything_in_order_over_segments(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    wrote = [note(i, b"k%d" % (i % 3)) for i in range(50)]
    for m in wrote:
        append(spool, m)
    assert len(spool.segments) == 5
    spool.close()  # gives back the lock as a death does; nothing is written by it
    again = open_spool(tmp_path)
    assert sum((s.keys for s in again.segments), start=type(again.segments[0].keys)()) == {
        b"k0": 17,
        b"k1": 17,
        b"k2": 16,
    }
    append(again, note(50))
    assert drain(again) == [*wrote, note(50)]
    assert again.size_bytes == 0 and list(tmp_path.glob("*.spool")) == []
    append(again, note(51))
    assert drain(again) == [note(51)]
    again.close()


def test_torn_tail_is_cut_off_and_kept(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    append(spool, note(1))
    spool.close()
    (file,) = tmp_path.glob("*.spool")
    file.write_bytes(file.read_bytes() + frame(note(2))[:-1])
    again = open_spool(tmp_path)
    append(again, note(3))
    assert drain(again) == [note(1), note(3)]
    (torn,) = tmp_path.glob("*.torn")
    assert torn.read_bytes() == frame(note(2))[:-1]
    again.close()


def test_bound_is_kept(tmp_path: Path) -> None:
    size = len(frame(note(1)))
    spool = open_spool(tmp_path, max_bytes=2 * size + 1)
    append(spool, note(1), note(2))
    with pytest.raises(SpoolFull):
        append(spool, note(3))
    assert spool.free_bytes == 1
    assert drain(spool) == [note(1), note(2)]
    append(spool, note(3))
    spool.close()


def test_a_disk_that_fails_midway_hides_nothing_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = open_spool(tmp_path)
    append(spool, note(1))
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) > 5:
            return write(fd, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(SpoolFailed, match="No space left"):
            spool.append([frame(note(2))[:9]])
    append(spool, note(3))
    assert drain(spool) == [note(1), note(3)]
    spool.close()


def test_a_torn_frame_that_can_not_be_cut_off_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = open_spool(tmp_path, segment_bytes=1 << 20)
    append(spool, note(1))

    def fails(*_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        patch.setattr(os, "ftruncate", fails)
        with pytest.raises(SpoolFailed):
            spool.append([frame(note(2))[:9]])
    append(spool, note(3))
    spool.close()
    again = open_spool(tmp_path)
    assert drain(again) == [note(1), note(3)], "what was replied to is there, though the disk failed once"
    again.close()


def test_what_the_disk_has_lost_is_said_and_kept(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=1 << 20)
    append(spool, note(1), note(2))
    (file,) = tmp_path.glob("*.spool")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert drain(spool) == [note(1)]
    (torn,) = tmp_path.glob("*.torn")
    assert torn.read_bytes() == data[len(frame(note(1))) :]
    spool.close()


# ---------------------------------------------------------------- journal

Body = Callable[[Journal, MemoryBus, Spool], Awaitable[None]]


def journal(directory: Path, body: Body, max_bytes: int = 1 << 20) -> MemoryBus:
    """Run body over a started journal, close it, give the bus."""

    async def run() -> MemoryBus:
        bus, spool = MemoryBus(), Spool(directory, max_bytes)
        it = Journal(bus, spool, Metrics())
        await it.start()
        await body(it, bus, spool)
        await it.close()
        return bus

    return asyncio.run(run())


def test_a_key_in_the_spool_goes_on_in_the_spool(tmp_path: Path) -> None:
    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.acknowledges = False
        assert await it.record([note(1)]) == "spooled"
        # Kafka takes what is new again, but the drain has not come by yet: the order of the key must hold.
        bus.acknowledges = True
        assert await it.record([note(2)]) == "spooled"
        assert await it.record([note(3, b"other")]) == "acknowledged"

    bus = journal(tmp_path, body)
    assert [m for m in bus.messages if m.key == b"k"] == [note(1), note(2)]
    assert note(3, b"other") in bus.messages


@pytest.mark.parametrize("seed", range(3))
def test_order_of_each_key_holds_while_kafka_comes_and_goes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    answered: dict[bytes, list[Message]] = {b"a": [], b"b": [], b"c": []}

    async def agent(it: Journal, key: bytes) -> None:
        for i in range(60):
            await it.record([note(i, key)])
            answered[key].append(note(i, key))
            await asyncio.sleep(rng.random() / 200)

    async def weather(bus: MemoryBus) -> None:
        while True:
            await asyncio.sleep(rng.random() / 50)
            bus.reachable = rng.random() < 0.6
            bus.acknowledges = rng.random() < 0.6

    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        outside = asyncio.create_task(weather(bus))
        await asyncio.gather(*(agent(it, key) for key in answered))
        outside.cancel()
        bus.reachable = bus.acknowledges = True

    bus = journal(tmp_path, body)
    for key, wanted in answered.items():
        assert [m for m in bus.messages if m.key == key] == wanted


def test_what_an_earlier_process_left_comes_first(tmp_path: Path) -> None:
    async def before(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        await it.record([note(1), note(2)])

    async def after(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        await it.record([note(3)])

    assert journal(tmp_path, before).messages == []
    assert journal(tmp_path, after).messages == [note(1), note(2), note(3)]


def test_many_at_once_share_few_fsyncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsyncs: list[int] = []
    fsync = os.fsync

    def counted(fd: int) -> None:
        fsyncs.append(fd)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)

    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        await asyncio.gather(*(it.record([note(i)]) for i in range(100)))
        bus.reachable = True

    bus = journal(tmp_path, body)
    assert bus.messages == [note(i) for i in range(100)]
    assert len(fsyncs) < 20


def test_full_spool_refuses_only_what_does_not_fit(tmp_path: Path) -> None:
    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        with it.reserve(50), pytest.raises(NoRoom), it.reserve(51):
            pass
        with it.reserve(100):
            pass
        await it.record([note(1)])
        with pytest.raises(NotRecorded):
            await it.record([Message("t", b"k", b"x" * 200)])
        await it.record([note(2)])
        assert it.spooled_keys == 1 and it.spooled_bytes == 2 * len(frame(note(1)))
        bus.reachable = True

    assert journal(tmp_path, body, max_bytes=100).messages == [note(1), note(2)]


def test_a_record_that_kafka_never_takes_is_set_aside(tmp_path: Path) -> None:
    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        await it.record([note(1)])
        await it.record([Message("t", b"k", b"x" * 200)])
        await it.record([note(2)])
        bus.max_bytes = 100
        bus.reachable = True

    assert journal(tmp_path, body).messages == [note(1), note(2)]
    assert [m.value for m, _ in frames((tmp_path / "refused").read_bytes())] == [b"x" * 200]


# ---------------------------------------------------------------- nothing, and segments with nothing in them


def files(directory: Path) -> list[Path]:
    return list(directory.glob("*.spool"))


@pytest.mark.parametrize("there", [True, False])
def test_no_records_are_recorded_at_once(tmp_path: Path, there: bool) -> None:
    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = bus.acknowledges = there
        assert await it.record([]) == "acknowledged"
        assert not spool.segments and not files(tmp_path)

    assert journal(tmp_path, body).messages == []


@pytest.mark.parametrize("fails", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO])
def test_a_first_write_that_fails_leaves_no_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, code: int
) -> None:
    def broken(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        with monkeypatch.context() as patch:
            patch.setattr(os, fails, broken)
            with pytest.raises(SpoolFailed):
                await it.record([note(1)])
        assert not spool.segments and not files(tmp_path)
        assert await it.record([note(2, b"2")]) == "spooled"
        bus.reachable = True

    assert journal(tmp_path, body).messages == [note(2, b"2")]


def test_a_segment_that_the_disk_has_emptied_holds_nothing_up(tmp_path: Path) -> None:
    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        await it.record([note(1)])
        (file,) = files(tmp_path)
        file.write_bytes(b"")
        spool.seal()
        await it.record([note(2)])
        bus.reachable = True
        await wait_for(lambda: not spool.segments)
        assert it.spooled_keys == 0

    assert journal(tmp_path, body).messages == [note(2)]


# ---------------------------------------------------------------- callers that leave


def test_what_was_begun_goes_on_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.gate.clear()
        for n in (1, 2):  # the second one will not be acknowledged
            caller = asyncio.create_task(it.record([note(n, b"%d" % n)]))
            await asyncio.sleep(0)
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
            if n == 1:
                bus.gate.set()
                await wait_for(lambda: bus.messages)
                bus.gate.clear()
        bus.acknowledges = False
        bus.gate.set()
        while not it.spooled_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        bus.acknowledges = True

    assert journal(tmp_path, body).messages == [note(1, b"1"), note(2, b"2")]


# ---------------------------------------------------------------- too old to be sent by itself


class At:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def lives(directory: Path, clock: At, bus: MemoryBus, *bodies: Callable[[Journal], Awaitable[None]]) -> Metrics:
    """Processes one after the other over one spool: started, done something with, closed. Gives the last one's metrics."""

    async def run() -> Metrics:
        metrics = Metrics()
        for body in bodies:
            metrics = Metrics()
            it = Journal(bus, Spool(directory, 10_000, now=clock), metrics, max_behind=100, max_age_s=3600)
            await it.start()
            await body(it)
            await it.close()
        return metrics

    return asyncio.run(run())


def held(directory: Path) -> list[Message]:
    return [m for path in sorted((directory / "held").glob("*.spool")) for m, _ in frames(path.read_bytes())]


def held_bytes(metrics: Metrics) -> float:
    value = metrics.registry.get_sample_value("clawstream_gateway_spool_held_bytes")
    assert value is not None
    return value


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("age_s", "others", "was_sent", "sent_by_itself"),
    [
        (50.0, 10**6, True, True),  # as young as this it is not asked
        (600.0, 100, True, True),
        (600.0, 101, True, False),  # the lake may have forgotten the copy that may be there
        (600.0, 10**6, False, True),  # there is no copy
        (3601.0, 0, False, False),  # its trajectories are closed or forgotten
    ],
)
def test_a_segment_that_is_too_old_is_held_back(
    tmp_path: Path, age_s: float, others: int, was_sent: bool, sent_by_itself: bool
) -> None:
    clock, bus = At(), MemoryBus()

    async def before(it: Journal) -> None:
        bus.reachable, bus.acknowledges = was_sent, False
        await it.record([note(1)])
        bus.reachable = False

    async def after(it: Journal) -> None:
        bus.reachable = bus.acknowledges = True
        bus.others = others
        clock.now += age_s
        await wait_for(lambda: not it.spooled_bytes)
        assert await it.record([note(2)]) == "acknowledged", "what is held back holds nothing up"

    metrics = lives(tmp_path, clock, bus, before, after)
    assert bus.messages == ([note(1), note(2)] if sent_by_itself else [note(2)])
    assert held(tmp_path) == ([] if sent_by_itself else [note(1)])
    assert held_bytes(metrics) == (0 if sent_by_itself else len(frame(note(1))))


def test_what_was_held_back_counts_within_the_bound_until_it_is_taken_away(tmp_path: Path) -> None:
    clock, size = At(), len(frame(note(1)))
    spool = Spool(tmp_path, 2 * size, now=clock)
    spool.open()
    append(spool, note(1))
    path = spool.hold(spool.segments[0])
    append(spool, note(2))
    with pytest.raises(SpoolFull):
        append(spool, note(3))
    path.unlink()
    append(spool, note(3))
    assert drain(spool) == [note(2), note(3)]
    spool.close()


def test_numbers_are_never_used_again_while_a_segment_has_them(tmp_path: Path) -> None:
    for n in range(3):
        spool = Spool(tmp_path, 10_000, now=At())
        spool.open()
        append(spool, note(n))
        spool.hold(spool.segments[0])
        spool.close()
    assert held(tmp_path) == [note(0), note(1), note(2)]


def test_a_drain_that_was_cut_short_marks_what_it_may_have_sent(tmp_path: Path) -> None:
    clock, bus = At(), MemoryBus()

    async def before(it: Journal) -> None:
        bus.reachable = False
        await it.record([note(1)])

    async def within(it: Journal) -> None:
        bus.gate.clear()
        bus.reachable = True
        await wait_for(lambda: list(tmp_path.glob("*-sent.spool")))
        bus.reachable = False  # and dies: what it has sent is not known
        bus.gate.set()

    lives(tmp_path, clock, bus, before, within)
    assert [m for path in tmp_path.glob("*-sent.spool") for m, _ in frames(path.read_bytes())] == [note(1)]


def test_what_may_be_sent_is_marked_for_good_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each durable write with what the directory durably says then: names count from the fsync of the directory on."""
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
    spool, size = Spool(tmp_path, 10_000, now=At()), len(frame(note(1)))
    spool.open()
    spool.append([frame(note(1))])
    spool.append([frame(note(2))], maybe_sent=True)
    spool.seal()
    spool.append([frame(note(3))], maybe_sent=True)
    first, second = "000000000001-1000000", "000000000002-1000000-sent.spool"
    assert seen == [({f"{first}.spool"}, size), ({f"{first}-sent.spool"}, 2 * size),
                    ({f"{first}-sent.spool", second}, size)]  # fmt: skip
    spool.seal()
    spool.append([frame(note(4))])
    spool.mark_sent(spool.segments[2])
    assert "000000000003-1000000-sent.spool" in durable
    spool.close()


def test_what_can_not_be_marked_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    spool = open_spool(tmp_path)
    append(spool, note(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", broken)
        with pytest.raises(SpoolFailed):
            spool.append([frame(note(2))], maybe_sent=True)
    append(spool, note(3))
    assert drain(spool) == [note(1), note(3)]
    spool.close()


def test_a_drain_waits_until_it_can_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def broken(*names: object) -> None:
        tries.append(names)
        raise OSError(errno.EIO, "Input/output error")

    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        await it.record([note(1)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", broken)
            bus.reachable = True
            await wait_for(lambda: len(tries) == 2)
            assert bus.messages == []
        await wait_for(lambda: not it.spooled_bytes)

    assert journal(tmp_path, body).messages == [note(1)]


# ---------------------------------------------------------------- the disk


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from gateway.bus import MemoryBus, Message
from gateway.errors import SpoolFailed
from gateway.journal import Journal
from gateway.metrics import Metrics
from gateway.spool import Spool
from runtime.telemetry import configure

async def main():
    bus, spool = MemoryBus(), Spool(Path(sys.argv[1]), 1 << 20)
    it = Journal(bus, spool, Metrics())
    await it.start()
    bus.reachable = False
    assert await it.record([Message("t", b"k", b"before")]) == "spooled"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # real writes that stop midway, those of the log too
    for i in range(20):
        try:
            await it.record([Message("t", b"k", b"x" * 4000)])
        except SpoolFailed as error:
            assert "File too large" in str(error), error
        else:
            raise AssertionError("it fitted")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await it.record([Message("t", b"k", b"after")]) == "spooled"
    bus.reachable = True
    await it.close()
    print([m.value.decode() for m in bus.messages])

configure("gateway")
asyncio.run(main())
"""


def test_a_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(tmp_path / "spool")], stdout=subprocess.PIPE, stderr=log, timeout=120
        )
    assert (done.returncode, done.stdout.decode().strip()) == (0, "['before', 'after']"), (tmp_path / "log").read_text()


def test_the_free_space_of_the_disk_bounds_the_spool_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs = os.statvfs

    def nearly_full(path: Path) -> os.statvfs_result:
        real = list(statvfs(path))
        real[1], real[4] = 4096, (DISK_RESERVE_BYTES // 4096) + 1  # f_frsize, f_bavail
        return os.statvfs_result(real)

    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", nearly_full)
            assert spool.free_bytes == 4096
            with pytest.raises(NoRoom), it.reserve(5000):
                pass
            with pytest.raises(SpoolFull):
                await it.record([Message("t", b"k", b"x" * 5000)])
        with it.reserve(5000):
            assert await it.record([note(1)]) == "spooled"
        bus.reachable = True

    assert journal(tmp_path, body).messages == [note(1)]


def test_a_spool_that_has_gone_says_so_and_does_not_hang(tmp_path: Path) -> None:
    directory = tmp_path / "spool"

    async def body(it: Journal, bus: MemoryBus, spool: Spool) -> None:
        bus.reachable = False
        shutil.rmtree(directory)
        with pytest.raises(NotRecorded):
            await it.record([note(1)])
        bus.reachable = True
        assert await it.record([note(2)]) == "acknowledged"

    assert journal(directory, body).messages == [note(2)]

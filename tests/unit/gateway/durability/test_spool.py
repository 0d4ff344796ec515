"""The spool: durable records survive, in order and within the size limit, despite disk errors."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.log_producer import InMemoryLogProducer
from support.spool import append, delivery, drain, files, note, open_spool, size_of, wait_for

from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.log import Message
from clawstream.gateway.durability.segment import sync_of
from clawstream.gateway.durability.spool import DISK_RESERVE_BYTES, Spool
from clawstream.gateway.durability.spool_frames import frame
from clawstream.gateway.errors import NoRoom, NotRecorded, SpoolFailed, SpoolFull


def test_a_crash_keeps_everything_in_order_over_segments(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    wrote = [note(i, b"k%d" % (i % 3)) for i in range(50)]
    for m in wrote:
        append(spool, m)
    assert len(spool.segments) == 7
    spool.close()  # releases the lock as a crash does, and writes nothing
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


def test_what_a_crash_cut_off_is_kept_and_hides_nothing(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    append(spool, note(1))
    spool.close()
    (file,) = tmp_path.glob("*.spool")
    cut_off = file.read_bytes() + frame(note(2), sync_of(file))[:-1]
    file.write_bytes(cut_off)
    again = open_spool(tmp_path)
    append(again, note(3))
    assert drain(again) == [note(1), note(3)]
    assert (tmp_path / "damaged" / file.name).read_bytes() == cut_off
    again.close()


def test_bound_is_kept(tmp_path: Path) -> None:
    size = size_of(note(1))
    spool = open_spool(tmp_path, max_bytes=2 * size + 1)
    append(spool, note(1), note(2))
    with pytest.raises(SpoolFull):
        append(spool, note(3))
    assert spool.free_bytes == 1
    assert drain(spool) == [note(1), note(2)]
    append(spool, note(3))
    spool.close()


def test_a_disk_that_fails_midway_hides_nothing_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            spool.append([note(2)])
    append(spool, note(3))
    assert drain(spool) == [note(1), note(3)]
    spool.close()


def test_a_torn_frame_that_can_not_be_cut_off_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path, segment_bytes=1 << 20)
    append(spool, note(1))

    write = os.write

    def torn(fd: int, data: bytes) -> int:
        write(fd, data[:9])
        raise OSError(errno.EIO, "Input/output error")

    def fails(*_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        patch.setattr(os, "ftruncate", fails)
        with pytest.raises(SpoolFailed):
            spool.append([note(2)])
    append(spool, note(3))
    spool.close()
    again = open_spool(tmp_path)
    assert drain(again) == [note(1), note(3)], (
        "what was replied to is there, though the disk failed once"
    )
    again.close()


def test_what_the_disk_has_lost_is_said_and_kept(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=1 << 20)
    append(spool, note(1), note(2))
    (file,) = tmp_path.glob("*.spool")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert drain(spool) == [note(1)]
    assert (tmp_path / "damaged" / file.name).read_bytes() == data
    spool.close()


def test_a_segment_that_the_disk_has_emptied_holds_nothing_up(tmp_path: Path) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        await it.record([note(1)])
        (file,) = files(tmp_path)
        file.write_bytes(b"")
        spool.seal()
        await it.record([note(2)])
        producer.reachable = True
        await wait_for(lambda: not it.spooled_keys)
        assert not spool.segments

    assert delivery(tmp_path, body).messages == [note(2)]


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from support.log_producer import InMemoryLogProducer
from clawstream.gateway.durability.log import Message
from clawstream.gateway.errors import SpoolFailed
from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.metrics import Metrics
from clawstream.gateway.durability.spool import Spool
from clawstream.runtime.logs import configure

async def main():
    producer, spool = InMemoryLogProducer(), Spool(Path(sys.argv[1]), 1 << 20)
    it = DeliveryManager(producer, spool, Metrics())
    await it.start()
    producer.reachable = False
    assert await it.record([Message("t", b"k", b"before")]) == "spooled"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # real writes that stop midway, \
those of the log too
    for i in range(20):
        try:
            await it.record([Message("t", b"k", b"x" * 4000)])
        except SpoolFailed as error:
            assert "File too large" in str(error), error
        else:
            raise AssertionError("it fitted")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await it.record([Message("t", b"k", b"after")]) == "spooled"
    producer.reachable = True
    await it.close()
    print([m.value.decode() for m in producer.messages])

configure("gateway")
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(tmp_path / "spool")],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # finds `support`
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=120,
        )
    assert (done.returncode, done.stdout.decode().strip()) == (0, "['before', 'after']"), (
        tmp_path / "log"
    ).read_text()


def test_the_free_space_of_the_disk_bounds_the_spool_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs = os.statvfs

    def nearly_full(path: Path) -> os.statvfs_result:
        real = list(statvfs(path))
        real[1], real[4] = 4096, (DISK_RESERVE_BYTES // 4096) + 1  # f_frsize, f_bavail
        return os.statvfs_result(real)

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", nearly_full)
            assert spool.free_bytes == 4096
            with pytest.raises(NoRoom), it.reserve(5000):
                pass
            with pytest.raises(SpoolFull):
                await it.record([Message("t", b"k", b"x" * 5000)])
        with it.reserve(5000):
            assert await it.record([note(1)]) == "spooled"
        producer.reachable = True

    assert delivery(tmp_path, body).messages == [note(1)]


def test_a_spool_that_has_gone_says_so_and_does_not_hang(tmp_path: Path) -> None:
    directory = tmp_path / "spool"

    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        shutil.rmtree(directory)
        with pytest.raises(NotRecorded):
            await it.record([note(1)])
        producer.reachable = True
        assert await it.record([note(2)]) == "acknowledged"

    assert delivery(directory, body).messages == [note(2)]

"""A spool on a disk that flips bits, truncates files and inserts bytes.

Damage loses only the records that it hits, and damaged files are kept.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.log_producer import InMemoryLogProducer
from support.spool import (
    append,
    delivery,
    drain,
    files,
    note,
    open_spool,
    sample,
    size_of,
    wait_for,
)

from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.log import LogPosition, Message
from clawstream.gateway.durability.quarantine import DAMAGED, damaged_in
from clawstream.gateway.durability.segment import read_segment, sync_of
from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.durability.spool_frames import SYNC_BYTES, frame, scan
from clawstream.gateway.metrics import Metrics

SYNC = b"\xf0marker\xf1"
messages = st.builds(Message, st.text(max_size=20), st.binary(max_size=30), st.binary(max_size=200))
RECORDS = [note(n, b"k%d" % (n % 3)) for n in range(30)]
ENDS = [sum(len(frame(m, SYNC)) for m in RECORDS[: n + 1]) for n in range(30)]
WHOLE = b"".join(frame(m, SYNC) for m in RECORDS)


def hit(at: int) -> int:
    """Return the index of the record that contains a byte of `WHOLE`."""
    return next(n for n, end in enumerate(ENDS) if at < end)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_each_byte_of_a_segment_flipped_in_turn_costs_at_most_the_record_hit(mask: int) -> None:
    for at in range(len(WHOLE)):
        data = bytearray(WHOLE)
        data[at] ^= mask
        found = scan(bytes(data), SYNC)
        n = hit(at)
        assert found.messages == RECORDS[:n] + RECORDS[n + 1 :], f"byte {at}"
        assert found.unreadable == [(ENDS[n] - len(frame(RECORDS[n], SYNC)), ENDS[n])], f"byte {at}"


def test_a_spool_whose_segment_has_any_byte_flipped_sends_all_others_and_keeps_the_damaged_file(
    tmp_path: Path,
) -> None:
    spool = open_spool(tmp_path, segment_bytes=1 << 20)
    append(spool, *RECORDS)
    spool.close()
    (file,) = tmp_path.glob("*.spool")
    whole = file.read_bytes()
    # Several bytes of each record, in header and payload; another test runs `scan` on every byte.
    for at in range(0, len(whole), 7):
        data = bytearray(whole)
        data[at] ^= 0xFF
        file.write_bytes(data)
        again = open_spool(tmp_path)
        drained = drain(again)
        again.close()
        n = hit(at)
        assert drained == RECORDS[:n] + RECORDS[n + 1 :], f"byte {at}"
        kept = tmp_path / DAMAGED / file.name
        assert kept.read_bytes() == data
        (told,) = damaged_in(tmp_path)
        assert (told.path, told.readable, told.unreadable_bytes) == (
            kept,
            29,
            len(frame(RECORDS[n], SYNC)),
        )
        kept.rename(file)


@st.composite
def damage(draw: st.DrawFn) -> tuple[list[Message], bytes, list[Message]]:
    """Generate records, a damaged segment of them, and the records that no damage touches.

    Damage flips, removes and inserts bytes.
    """
    items = draw(st.lists(messages, min_size=1, max_size=8))
    data = b"".join(frame(m, SYNC) for m in items)
    owner = [n for n, m in enumerate(items) for _ in frame(m, SYNC)]
    touched: set[int] = set()
    pieces: list[bytes] = []
    at = 0
    for place in sorted(draw(st.lists(st.integers(0, len(data)), max_size=4))):
        place = max(place, at)
        pieces.append(data[at:place])
        at = place
        match draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip" if at < len(data):
                pieces.append(bytes([data[at] ^ draw(st.integers(1, 255))]))
                touched.add(owner[at])
                at += 1
            case "cut":
                end = min(len(data), at + draw(st.integers(1, 150)))
                touched.update(owner[at:end])
                at = end
            case "insert":
                pieces.append(
                    draw(
                        st.one_of(
                            st.binary(min_size=1, max_size=60), st.just(SYNC), st.just(data[:30])
                        )
                    )
                )
                if 0 < at < len(data) and owner[at] == owner[at - 1]:
                    touched.add(owner[at])
    pieces.append(data[at:])
    return items, b"".join(pieces), [m for n, m in enumerate(items) if n not in touched]


@pytest.mark.slow
@given(damage())
def test_whatever_happens_to_a_segment_what_was_not_touched_is_read_and_nothing_else(
    case: tuple[list[Message], bytes, list[Message]],
) -> None:
    items, data, intact = case
    found = scan(data, SYNC)
    rest = iter(found.messages)
    assert all(m in rest for m in intact), "in order"
    frames = {frame(m, SYNC) for m in items}
    assert all(frame(m, SYNC) in frames for m in found.messages)
    covered = sum(len(frame(m, SYNC)) for m in found.messages) + found.unreadable_bytes
    assert covered == len(data), "every byte is of a record or kept as unreadable"


@given(st.lists(messages, max_size=8), st.binary(max_size=40))
@example([], SYNC * 4)
def test_frames_round_trip_and_a_tail_that_is_no_frame_is_said(
    items: list[Message], tail: bytes
) -> None:
    data = b"".join(frame(m, SYNC) for m in items)
    assert scan(data, SYNC) == (items, [])
    found = scan(data + tail, SYNC)
    assert found == (items, [(len(data), len(data) + len(tail))] if tail else [])


@given(st.lists(messages, min_size=1, max_size=6), st.data())
def test_cut_anywhere_leaves_exactly_the_whole_frames(
    items: list[Message], data: st.DataObject
) -> None:
    whole = b"".join(frame(m, SYNC) for m in items)
    cut = data.draw(st.integers(0, len(whole)))
    ends = [sum(len(frame(m, SYNC)) for m in items[: i + 1]) for i in range(len(items))]
    assert scan(whole[:cut], SYNC).messages == items[: sum(e <= cut for e in ends)]


def test_a_frame_inside_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    """A client that embeds frames in its prompts cannot guess the marker of the segment."""
    spool = open_spool(tmp_path, segment_bytes=1 << 20)
    forged = frame(Message("claw.rewards", b"other", b"forged"), os.urandom(SYNC_BYTES))
    append(spool, Message("t", b"k", forged), note(1))
    spool.close()
    (file,) = tmp_path.glob("*.spool")
    assert sync_of(file) == file.read_bytes()[:SYNC_BYTES]
    data = bytearray(file.read_bytes())
    data[SYNC_BYTES] ^= 1  # the length field: the end of the record is unknown
    file.write_bytes(data)
    again = open_spool(tmp_path)
    assert drain(again) == [note(1)]
    again.close()


def test_a_flipped_byte_of_the_position_costs_nothing(tmp_path: Path) -> None:
    position = LogPosition("AAAAAAAAAAAAAAAAAAAAAA", (17, 4))
    spool = open_spool(tmp_path, segment_bytes=1 << 20)
    spool.append(RECORDS, position=position)
    spool.close()
    (file,) = tmp_path.glob("*.spool")
    whole = file.read_bytes()
    for at in range(len(whole) - len(WHOLE)):
        data = bytearray(whole)
        data[at] ^= 0xFF
        file.write_bytes(data)
        found = read_segment(file)
        assert (found.messages, found.position) == (RECORDS, position), f"byte {at}"


def test_two_processes_have_two_markers(tmp_path: Path) -> None:
    for _ in range(2):
        spool = open_spool(tmp_path)
        append(spool, note(1))
        spool.close()
    assert len({sync_of(path) for path in tmp_path.glob("*.spool")}) == 2


def test_damage_is_counted_and_does_not_stop_the_delivery(tmp_path: Path) -> None:
    async def body(it: DeliveryManager, producer: InMemoryLogProducer, spool: Spool) -> None:
        producer.reachable = False
        await it.record([note(1), note(2), note(3)])
        (file,) = files(tmp_path)
        data = bytearray(file.read_bytes())
        size = size_of(note(2))
        data[-size - 1] ^= 1
        file.write_bytes(data)
        producer.reachable = True
        await wait_for(lambda: not it.spooled_keys)
        assert sample(metrics, "spool_unreadable_bytes_total") == size
        assert sample(metrics, "spool_damaged_bytes") == len(data)

    metrics = Metrics()
    assert delivery(tmp_path, body, metrics=metrics).messages == [note(1), note(3)]


def test_a_segment_of_which_nothing_can_be_read_is_moved_to_damaged_at_the_start(
    tmp_path: Path,
) -> None:
    spool = open_spool(tmp_path)
    append(spool, note(1))
    spool.close()
    (file,) = tmp_path.glob("*.spool")
    file.write_bytes(b"\0" * 100)
    again = open_spool(tmp_path)
    assert again.segments == [] and again.unreadable_bytes == 100 and again.damaged_bytes == 100
    append(again, note(2))
    assert drain(again) == [note(2)]
    again.close()
    assert {p.name for p in tmp_path.rglob("*.spool")} == {file.name}


def test_blocks_that_the_disk_does_not_give_back_cost_their_records_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path, segment_bytes=1 << 20)
    items = [Message("t", b"k", b"%d" % n * 1000) for n in range(10)]
    append(spool, *items)
    pread = os.pread

    def bad_block(fd: int, length: int, at: int) -> bytes:
        if at <= 4096 < at + length:
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, length, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", bad_block)
        drained = drain(spool)
    assert [m for m in items if m in drained] == drained and 4 <= len(drained) < 10
    (told,) = damaged_in(tmp_path)
    assert told.readable == 10, "the disk gives it back again: `clawstream spool drain` can send it"
    spool.close()

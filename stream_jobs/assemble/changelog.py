"""The state log of assemble, `claw.assembly`: what its records mean when read back, and how they are made. Pure.

A partition holds, in order: a marker of each new owner (its offset is the owner's epoch), deltas, and pieces of snapshots. A record whose
epoch is below the highest one seen before it is a fenced writer's and counts for nothing. A marker may have been trimmed away: a
record of a higher epoch is taken without it. But a marker always lies before what its owner writes: a record whose epoch is not below its
own offset was written by a worker that did not notice that the topic was made anew, and counts for nothing either.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import cramjam
import orjson

from runtime.kafka import Record
from runtime.topics.records import Decoder
from schemas.errors import Undecodable, UnknownSchema
from schemas.records import AssemblyDelta, AssemblyMarker, AssemblySnapshot
from stream_jobs.assemble.model import ChangeKind, OpenStep, StateChange
from stream_jobs.assemble.state import PartitionState
from stream_jobs.errors import UnreadableChangelog

CHUNK_BYTES = 900_000
LEVEL = 1
FORMAT = 3
"""Of entries and snapshots, which have no schema. Rises when this release writes what one before it would not read, or read wrongly."""
READ = (1, 2, FORMAT)
"""What this release reads. 1: the hashes of steps were in their entries. 2: there were no silences,
`messages` and `call_id`."""
HASH_FIELDS = tuple(
    OpenStep._fields.index(name)
    for name in (
        "end_hash",
        "prompt_hash",
        "idempotency_hash",
        "reply_hash",
        "last_turn_hash",
        "messages_hash",
        "call_id_hash",
    )
)
"""Places in the entry of a step."""


class ChangelogReader:
    """Rebuilds the state from the records of one partition. `read` each in offset order; then `state`, `seq`.

    bytes_since_snapshot, snapshot_bytes: how long the log behind the newest complete snapshot is, and how large that was.
    known: whether the log holds any state at all.
    """

    def __init__(self) -> None:
        self.state = PartitionState()
        self.seq = 0
        self.known = False
        self.bytes_since_snapshot = 0
        self.snapshot_bytes = 0
        self._epoch = -1
        self._pieces: list[AssemblySnapshot] = []

    def read(self, offset: int, record: object, size: int) -> None:
        """Take the next record. size: its bytes. Raises UnreadableChangelog when a delta is missing."""
        if not accepts(offset, record, self._epoch):
            return
        if isinstance(record, AssemblyDelta | AssemblySnapshot) and record.format not in READ:
            raise UnreadableChangelog(
                f"state log, offset {offset}: written in format {record.format}, this release has {FORMAT}; "
                f"run all assemble workers on {'the newer' if record.format > FORMAT else 'that older'} release"
            )
        match record:
            case AssemblyMarker():
                self._epoch = offset
            case AssemblyDelta():
                self._epoch = record.epoch
                self._delta(offset, record)
                self.bytes_since_snapshot += size
            case AssemblySnapshot():
                self._epoch = record.epoch
                self._snapshot(record)

    def _delta(self, offset: int, delta: AssemblyDelta) -> None:
        if delta.seq <= self.seq:
            return
        if (
            delta.seq != self.seq + 1
        ):  # the log is trimmed up to a complete snapshot, so its first delta is 1 or follows one
            raise UnreadableChangelog(
                f"state log, offset {offset}: delta {delta.seq} follows {self.seq}; run clawstream doctor"
            )
        self.known = True
        self.seq = delta.seq
        try:
            for entry in unpack_changes(delta):
                self.state.apply(entry)
        except (LookupError, TypeError, ValueError, struct.error) as e:
            raise UnreadableChangelog(
                f"state log, offset {offset}: an entry that this release can't apply ({type(e).__name__}: {e}); "
                "if a newer release wrote it, upgrade all assemble workers"
            ) from e
        self.state.applied = [delta.applied_steps, delta.applied_rewards]

    def _snapshot(self, piece: AssemblySnapshot) -> None:
        if piece.index == 0:
            self._pieces = []
        elif (
            not self._pieces
            or self._pieces[-1].snapshot_id != piece.snapshot_id
            or piece.index != len(self._pieces)
        ):
            return
        self._pieces.append(piece)
        if len(self._pieces) == piece.count:
            packed = b"".join(p.data for p in self._pieces)
            self.state = PartitionState.load(bytes(cramjam.zstd.decompress(packed)))
            self.seq = piece.seq
            self.known = True
            self.bytes_since_snapshot, self.snapshot_bytes, self._pieces = 0, len(packed), []


ChangelogRecord = AssemblyMarker | AssemblyDelta | AssemblySnapshot


def accepts(offset: int, record: object, epoch: int) -> bool:
    """Whether a reader takes the record at `offset`, when `epoch` is the highest one it has seen before it."""
    if isinstance(record, AssemblyMarker):
        return offset > epoch
    return isinstance(record, AssemblyDelta | AssemblySnapshot) and epoch <= record.epoch < offset


def decode_record(decoder: Decoder, record: Record) -> ChangelogRecord:
    """What a record of the state log says. Raises UnreadableChangelog: only assemble writes there, so poison is a broken invariant."""
    try:
        event = decoder.decode(record.value)
        if isinstance(event, ChangelogRecord):
            return event
        what = f"a {type(event).__name__} does not belong there"
    except (Undecodable, UnknownSchema) as e:
        what = str(e)
    raise UnreadableChangelog(
        f"state log {record.topic}-{record.partition}, offset {record.offset}: {what}; only assemble may write there; "
        "run clawstream doctor"
    )


def delta(
    epoch: int, seq: int, state: PartitionState, entries: Iterable[StateChange]
) -> AssemblyDelta:
    """The delta that leads to `state`. How far its clocks are goes with how far it has read: what it read is not read again."""
    steps, rewards = state.applied
    changes, hashes = _packed([[ChangeKind.CLOCKS_ADVANCED, *state.time], *entries])
    return AssemblyDelta(
        epoch=epoch,
        seq=seq,
        applied_steps=steps,
        applied_rewards=rewards,
        entries=changes,
        format=FORMAT,
        hashes=hashes,
    )


def snapshot(epoch: int, seq: int, state: PartitionState) -> list[AssemblySnapshot]:
    """The pieces of a snapshot of `state`, in which nothing is pending."""
    assert not state.pending, "a snapshot is taken when nothing is pending"
    data = bytes(cramjam.zstd.compress(state.dump(), LEVEL))
    pieces = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    return [
        AssemblySnapshot(
            epoch=epoch, seq=seq, snapshot_id=f"{epoch}.{seq}", index=i, count=len(pieces), data=piece, format=FORMAT
        )
        for i, piece in enumerate(pieces)
    ]  # fmt: skip


def unpack_changes(delta: AssemblyDelta) -> list[StateChange]:
    """The entries of a delta. Raises LookupError, ValueError or struct.error when they are not what one holds."""
    entries: list[StateChange] = orjson.loads(bytes(cramjam.zstd.decompress(delta.entries)))
    if delta.format == 1:
        return entries
    hashes, at = struct.unpack(f"<{len(delta.hashes) // 8}q", delta.hashes), 0
    for entry in entries:
        if entry[0] == ChangeKind.STEP_ADDED:
            step = entry[2]
            for i in HASH_FIELDS:
                if i < len(step) and step[i] is not None:
                    step[i] = hashes[at]
                    at += 1
    if at != len(hashes):
        raise ValueError(f"{len(hashes)} hashes where the steps have {at}")
    return entries


def _packed(entries: Iterable[StateChange]) -> tuple[bytes, bytes]:
    """Entries as zstd of JSON, and beside it the hashes of their steps, eight bytes each: as digits they are random text, which takes more."""
    plain, hashes = list[StateChange](), list[int]()
    for entry in entries:
        if entry[0] != ChangeKind.STEP_ADDED:
            plain.append(entry)
            continue
        step = entry[2].copy()
        for i in HASH_FIELDS:
            if step[i] is not None:
                hashes.append(step[i])
                step[i] = 0
        while step[-1] is None:  # up to `reply` at most, the first that may be left out
            step.pop()
        plain.append([ChangeKind.STEP_ADDED, entry[1], step])
    return bytes(cramjam.zstd.compress(orjson.dumps(plain), LEVEL)), struct.pack(
        f"<{len(hashes)}q", *hashes
    )

"""The changelog of assemble, `claw.assembly`: how its records are written and read. Pure.

A partition holds, in order: a marker of each new owner (its offset is the owner's epoch),
deltas, and chunks of snapshots. A record whose epoch is below the highest epoch before it
belongs to a fenced writer and is ignored. A marker may have been trimmed: a record of a higher
epoch is accepted without it. A marker always precedes the records of its owner: a record whose
epoch is not below its own offset was written by a worker that did not notice that the topic was
recreated, and is ignored too.
"""

from __future__ import annotations

from collections.abc import Sequence

import cramjam

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import AssemblyDelta, AssemblyMarker, AssemblySnapshot
from clawstream.stream_jobs.assemble.state.changes import (
    Change,
    ClocksAdvanced,
    decode_changes,
    encode_changes,
)
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.errors import UnreadableChangelog

CHUNK_BYTES = 900_000
LEVEL = 1
FORMAT = 5
"""Format of changes and snapshots, which have no schema. Increment it when older releases cannot
read the new one.
"""


class ChangelogReader:
    """Rebuilds the state from the records of one partition. Call `read` for each record in offset
    order.

    Attributes:
        state, seq: The state, and the sequence number of the last delta.
        bytes_since_snapshot, snapshot_bytes: Size of the changelog after the newest complete
            snapshot, and of that snapshot.
        known: Whether the changelog holds any state.
    """

    def __init__(self) -> None:
        self.state = PartitionState()
        self.seq = 0
        self.known = False
        self.bytes_since_snapshot = 0
        self.snapshot_bytes = 0
        self._epoch = -1
        self._chunks: list[AssemblySnapshot] = []

    def read(self, offset: int, record: object, size: int) -> None:
        """Read the next record. size: its bytes. Raises UnreadableChangelog when a delta is
        missing.
        """
        if not accepts(offset, record, self._epoch):
            return
        if isinstance(record, AssemblyDelta | AssemblySnapshot) and record.format != FORMAT:
            raise UnreadableChangelog(
                f"changelog, offset {offset}: written in format {record.format}, "
                f"this release has {FORMAT}; run all assemble workers on "
                f"{'the newer' if record.format > FORMAT else 'that older'} release"
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
        if delta.seq != self.seq + 1:
            # The log is trimmed up to a complete snapshot, so its first delta is 1 or follows one.
            raise UnreadableChangelog(
                f"changelog, offset {offset}: delta {delta.seq} follows {self.seq}; "
                "run clawstream status --positions"
            )
        self.known = True
        self.seq = delta.seq
        try:
            for change in changes_of(delta):
                change.apply(self.state)
        except (LookupError, ValueError) as e:
            raise UnreadableChangelog(
                f"changelog, offset {offset}: a change that this release can't apply "
                f"({type(e).__name__}: {e}); "
                "if a newer release wrote it, upgrade all assemble workers"
            ) from e
        self.state.applied = [delta.applied_steps, delta.applied_rewards]

    def _snapshot(self, chunk: AssemblySnapshot) -> None:
        if chunk.index == 0:
            self._chunks = []
        elif (
            not self._chunks
            or self._chunks[-1].snapshot_id != chunk.snapshot_id
            or chunk.index != len(self._chunks)
        ):
            return
        self._chunks.append(chunk)
        if len(self._chunks) == chunk.count:
            packed = b"".join(p.data for p in self._chunks)
            self.state = PartitionState.load(_decompressed(packed))
            self.seq = chunk.seq
            self.known = True
            self.bytes_since_snapshot, self.snapshot_bytes, self._chunks = 0, len(packed), []


ChangelogRecord = AssemblyMarker | AssemblyDelta | AssemblySnapshot


def accepts(offset: int, record: object, epoch: int) -> bool:
    """Return whether readers accept the record at `offset`. epoch: the highest one before it."""
    if isinstance(record, AssemblyMarker):
        return offset > epoch
    return isinstance(record, AssemblyDelta | AssemblySnapshot) and epoch <= record.epoch < offset


def decode_record(decoder: Decoder, record: Record) -> ChangelogRecord:
    """Decode a record of the changelog.

    Raises:
        UnreadableChangelog: It cannot be decoded. Only assemble writes there, so this is a
            broken invariant.
    """
    try:
        event = decoder.decode(record.value)
        if isinstance(event, ChangelogRecord):
            return event
        what = f"a {type(event).__name__} does not belong there"
    except (Undecodable, UnknownSchema) as e:
        what = str(e)
    raise UnreadableChangelog(
        f"changelog {record.topic}-{record.partition}, offset {record.offset}: {what}; "
        "only assemble may write there; run clawstream status --positions"
    )


def delta(epoch: int, seq: int, state: PartitionState, changes: Sequence[Change]) -> AssemblyDelta:
    """Create the delta that leads to `state`. It includes the clocks, because applied records are
    not read again.
    """
    steps, rewards = state.applied
    data, hashes = encode_changes([ClocksAdvanced(*state.time), *changes])
    return AssemblyDelta(
        epoch=epoch,
        seq=seq,
        applied_steps=steps,
        applied_rewards=rewards,
        entries=_compressed(data),
        format=FORMAT,
        hashes=hashes,
    )


def changes_of(delta: AssemblyDelta) -> list[Change]:
    """Return the changes of a delta. Raises ValueError for malformed content."""
    return decode_changes(_decompressed(delta.entries), delta.hashes)


def snapshot(epoch: int, seq: int, state: PartitionState) -> list[AssemblySnapshot]:
    """Create the chunks of a snapshot. Requires that no output is pending."""
    assert not state.pending, "a snapshot is taken when nothing is pending"
    data = _compressed(state.dump())
    chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    return [
        AssemblySnapshot(
            epoch=epoch,
            seq=seq,
            snapshot_id=f"{epoch}.{seq}",
            index=i,
            count=len(chunks),
            data=chunk,
            format=FORMAT,
        )
        for i, chunk in enumerate(chunks)
    ]


def _compressed(data: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(data, LEVEL))


def _decompressed(data: bytes) -> bytes:
    return bytes(cramjam.zstd.decompress(data))

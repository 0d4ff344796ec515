"""The closed trajectories of a partition: encoded, except those in use. Pure.

A partition may have tens of thousands of them, so each is stored encoded. A trajectory that a
batch reads or changes is decoded once, and encoded again when the outputs are done. A hundred
rewards of one trajectory cost one decode and one encode.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from msgspec import Raw

from clawstream.stream_jobs.assemble.state.encoding import decoder, encode
from clawstream.stream_jobs.assemble.state.trajectories import ClosedTrajectory, RunTrajectory

DECODED_MAX = 100_000
"""Steps, rewards and marks that may be decoded at once (about 40 MB). Beyond it all are encoded;
decoding 1,000 steps takes 5 ms.
"""
ONE_BYTES = 4096
"""Encoded size that counts as one trajectory: about 40 steps, or 20 with a reward each. A longer
trajectory counts as several.
"""

_DECODER = decoder(ClosedTrajectory)


class ClosedStore:
    """Closed trajectories in closing order. Use `store[key]` to read and `store.change(key)` to
    modify; do not hold either across other calls.
    """

    def __init__(self, packed: Iterable[tuple[RunTrajectory, bytes]] = ()) -> None:
        self._packed = OrderedDict(packed)
        self.counted = sum(map(_count, self._packed.values()))
        """How many trajectories these count as: a bound on it is one on memory."""
        self._decoded: dict[RunTrajectory, ClosedTrajectory] = {}
        self._changed: dict[RunTrajectory, None] = {}
        self._weight = 0

    def __contains__(self, key: object) -> bool:
        return key in self._packed

    def __iter__(self) -> Iterator[RunTrajectory]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClosedStore):
            return NotImplemented
        self.pack()
        other.pack()
        return self._packed == other._packed

    def __getitem__(self, key: RunTrajectory) -> ClosedTrajectory:
        closed = self._decoded.get(key)
        return closed if closed is not None else self._hold(key, _DECODER.decode(self._packed[key]))

    def add(self, key: RunTrajectory, closed: ClosedTrajectory) -> None:
        """Add a trajectory. The store owns the object afterwards."""
        self._hold(key, closed)
        self._put(key, b"")
        self._changed[key] = None

    def change(self, key: RunTrajectory) -> ClosedTrajectory:
        """Return a trajectory for immediate modification."""
        closed = self[key]
        self._changed[key] = None
        self._weight += 1
        return closed

    def pop(self, key: RunTrajectory) -> ClosedTrajectory:
        """Remove and return a trajectory. Raises KeyError."""
        closed = self[key]
        self.counted -= _count(self._packed.pop(key))
        del self._decoded[key]
        self._changed.pop(key, None)
        return closed

    def pack(self) -> None:
        """Encode all decoded trajectories."""
        for key in self._changed:
            self._put(key, encode(self._decoded[key]))
        self._decoded.clear()
        self._changed.clear()
        self._weight = 0

    def encoded(self) -> list[tuple[RunTrajectory, Raw]]:
        """Return key and encoded content of each trajectory, for a snapshot."""
        self.pack()
        return [(key, Raw(packed)) for key, packed in self._packed.items()]

    def _put(self, key: RunTrajectory, packed: bytes) -> None:
        old = self._packed.get(key)
        self.counted += _count(packed) - (_count(old) if old is not None else 0)
        self._packed[key] = packed

    def _hold(self, key: RunTrajectory, closed: ClosedTrajectory) -> ClosedTrajectory:
        if self._weight > DECODED_MAX:
            self.pack()
        annotations = closed.annotations
        self._weight += 1 + len(closed.steps) + len(annotations.rewards) + len(annotations.seen)
        self._decoded[key] = closed
        return closed


def _count(packed: bytes) -> int:
    return 1 + len(packed) // ONE_BYTES

"""The closed trajectories of a partition: packed, but for those that are in hand. Pure.

There may be tens of thousands of them, so each is kept as the JSON of `Closed.dump`. What a batch looks at or changes is unpacked once
and packed again when its outputs are done: a hundred rewards of one trajectory cost as much as one to read and write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import orjson

from stream_jobs.assemble.model import ClosedTrajectory, RunTrajectory

DECODED_MAX = 100_000
"""Steps, rewards and marks that are in hand, roughly, before all are packed: a bound on memory, about 40 MB. Rewards of more steps than that
which come mixed in one batch cost an unpacking each, 5 ms for 1,000 steps."""
ONE_BYTES = 4096
"""Of a trajectory that counts as one, packed: some 40 steps, or 20 with a reward on each. A longer one counts as several."""


class ClosedStore:
    """By time of closing. `archive[key]` is for reading, `change(key)` for changing it there and then: neither is to be held across
    other calls."""

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
        return (
            closed
            if closed is not None
            else self._hold(key, ClosedTrajectory.load(self._packed[key]))
        )

    def add(self, key: RunTrajectory, closed: ClosedTrajectory) -> None:
        """One more; it is the archive's own from now on."""
        self._hold(key, closed)
        self._put(key, b"")
        self._changed[key] = None

    def change(self, key: RunTrajectory) -> ClosedTrajectory:
        """To be changed at once."""
        closed = self[key]
        self._changed[key] = None
        self._weight += 1
        return closed

    def pop(self, key: RunTrajectory) -> ClosedTrajectory:
        """Take one out. Raises KeyError."""
        closed = self[key]
        self.counted -= _count(self._packed.pop(key))
        del self._decoded[key]
        self._changed.pop(key, None)
        return closed

    def pack(self) -> None:
        """Have nothing in hand."""
        for key in self._changed:
            self._put(key, self._decoded[key].dump())
        self._decoded.clear()
        self._changed.clear()
        self._weight = 0

    def dump(self) -> list[list[str | orjson.Fragment]]:
        """Run, trajectory id and content of each, for a snapshot."""
        self.pack()
        return [[*key, orjson.Fragment(packed)] for key, packed in self._packed.items()]

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

"""The closed trajectories of a partition: packed, but for those that are in hand. Pure.

There may be tens of thousands of them, so each is kept as the JSON of `Closed.dump`. What a batch looks at or changes is unpacked once
and packed again when its outputs are done: a hundred rewards of one trajectory cost as much as one to read and write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import orjson

from stream_jobs.index import Closed, Key

IN_HAND_MAX = 20_000
"""Steps, rewards and marks that are in hand, roughly, before all are packed: a bound on memory, about 10 MB."""


class Archive:
    """By time of closing. `archive[key]` is for reading, `change(key)` for changing it there and then: neither is to be held across
    other calls."""

    def __init__(self, packed: Iterable[tuple[Key, bytes]] = ()) -> None:
        self._packed = OrderedDict(packed)
        self._in_hand: dict[Key, Closed] = {}
        self._changed: dict[Key, None] = {}
        self._weight = 0

    def __contains__(self, key: object) -> bool:
        return key in self._packed

    def __iter__(self) -> Iterator[Key]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Archive):
            return NotImplemented
        self.pack()
        other.pack()
        return self._packed == other._packed

    def __getitem__(self, key: Key) -> Closed:
        closed = self._in_hand.get(key)
        return closed if closed is not None else self._hold(key, Closed.load(self._packed[key]))

    def add(self, key: Key, closed: Closed) -> None:
        """One more; it is the archive's own from now on."""
        self._hold(key, closed)
        self._packed[key] = b""
        self._changed[key] = None

    def change(self, key: Key) -> Closed:
        """To be changed at once."""
        closed = self[key]
        self._changed[key] = None
        self._weight += 1
        return closed

    def pop(self, key: Key) -> Closed:
        """Take one out. Raises KeyError."""
        closed = self[key]
        del self._packed[key], self._in_hand[key]
        self._changed.pop(key, None)
        return closed

    def pack(self) -> None:
        """Have nothing in hand."""
        for key in self._changed:
            self._packed[key] = self._in_hand[key].dump()
        self._in_hand.clear()
        self._changed.clear()
        self._weight = 0

    def dump(self) -> list[list[str | orjson.Fragment]]:
        """Run, trajectory id and content of each, for a snapshot."""
        self.pack()
        return [[*key, orjson.Fragment(packed)] for key, packed in self._packed.items()]

    def _hold(self, key: Key, closed: Closed) -> Closed:
        if self._weight > IN_HAND_MAX:
            self.pack()
        folded = closed.folded
        self._weight += 1 + len(closed.steps) + len(folded.rewards) + len(folded.seen)
        self._in_hand[key] = closed
        return closed

"""The closed trajectories of a partition, packed and decoded."""

from __future__ import annotations

import pytest
from support.assemble import InMemoryPartition, curation, reward, session, step

from clawstream.stream_jobs.assemble.state import closed_store
from clawstream.stream_jobs.assemble.state.annotations import Annotations
from clawstream.stream_jobs.assemble.state.closed_store import ClosedStore
from clawstream.stream_jobs.assemble.state.encoding import decoder, encode
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import (
    REWARDS,
    STEPS,
    ClosedStep,
    ClosedTrajectory,
)


def closed(steps: int = 1) -> ClosedTrajectory:
    entries = [ClosedStep(f"C{i}.0", 0, 5, None, "r/1.0", "r/1.0") for i in range(steps)]
    return ClosedTrajectory(
        0, 1, "completed", None, "train", None, None, None, entries, Annotations()
    )


def test_what_is_changed_in_hand_is_what_is_packed() -> None:
    kept = ClosedStore()
    for name in ("b", "a"):
        kept.add(("r", name), closed())
    kept.change(("r", "b")).revision += 3
    assert list(kept) == [("r", "b"), ("r", "a")] and kept["r", "b"].revision == 2
    kept.pack()
    kept.change(("r", "a")).outcome = "lost"
    assert [key for key, _ in kept.encoded()] == [("r", "b"), ("r", "a")]
    assert (kept["r", "b"].revision, kept["r", "a"].outcome) == (2, "lost")
    assert kept.pop(("r", "b")).revision == 2 and ("r", "b") not in kept and len(kept) == 1
    with pytest.raises(KeyError):
        kept.pop(("r", "b"))


def test_what_is_in_hand_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_store, "DECODED_MAX", 100)
    kept, most = ClosedStore(), 0
    for i in range(100):
        kept.add(("r", str(i)), closed(10))
    for i in range(100):
        kept.change(("r", str(i))).revision += 1
        most = max(most, len(kept._decoded))
    assert most <= 11
    assert [kept["r", str(i)].revision for i in range(100)] == [0] * 100


def test_a_long_one_counts_as_several() -> None:
    kept = ClosedStore()
    kept.add(("r", "long"), closed(1000))
    kept.add(("r", "short"), closed(8))
    kept.pack()
    long = kept.counted - 1
    assert (
        10 <= long <= 20
        and ClosedStore((key, bytes(one)) for key, one in kept.encoded()).counted == long + 1
    )
    kept.change(("r", "short")).late += range(10**6, 10**6 + 1000)
    kept.pack()
    assert kept.counted == long + 3
    kept.pop(("r", "long"))
    assert kept.counted == 3 and kept.pop(("r", "short")).revision == -1 and kept.counted == 0


def test_rewards_of_one_closed_trajectory_unpack_it_once_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = InMemoryPartition().feed(
        *((STEPS, 0, step("k", n, (n + 5,))) for n in range(20)),
        (STEPS, 1, session("k", "completed")),
    )
    loads: list[bytes] = []

    class Counted:
        def decode(self, packed: bytes) -> ClosedTrajectory:
            loads.append(packed)
            return decoder(ClosedTrajectory).decode(packed)

    monkeypatch.setattr(closed_store, "_DECODER", Counted())
    w.feed(
        *((REWARDS, 2, reward("k", 1.0, n)) for n in range(20)),
        *((REWARDS, 2, curation("k", f"e{n}", n, quality=0.5)) for n in range(20))
    )  # fmt: skip
    assert len(loads) == 1
    assert len(w.last("k").rewards) == 20


def test_a_crash_with_rewards_in_hand_comes_back_to_the_same_bytes() -> None:
    w = InMemoryPartition().feed((STEPS, 0, step("k", 0)), (STEPS, 1, session("k", "completed")))
    w.decide([(REWARDS, 0, 2, reward("k", 0.5)), (REWARDS, 1, 2, curation("k", "e", tags=("x",)))])
    was = encode(w.state.closed.encoded())
    w.crash()
    assert encode(w.state.closed.encoded()) == was
    assert PartitionState.load(w.state.dump()).closed == w.state.closed

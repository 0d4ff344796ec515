"""Rewards of channel val by the version that sampled them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.schemas.records import BatchGroup, BatchMember, Place, ReadyBatch, RewardValue
from clawstream.trainer.metrics.validation import Validation, Validations, summary

Rows = Sequence[tuple[int, int | None, float | None]]
"""(group, oldest sync index, reward) of each trajectory."""


def batch(rows: Rows, first: int = 0) -> ReadyBatch:
    """Return a batch; trajectories are numbered from `first`."""
    groups: dict[int, list[BatchMember]] = {}
    for number, (group, sync_index, value) in enumerate(rows, first):
        reward = RewardValue(
            source="rule", name="r", function_version="1", value=value, reward_revision=0
        )
        groups.setdefault(group, []).append(
            BatchMember(
                trajectory_id=f"t{number}",
                trajectory_key=f"t{number}",
                revision=1,
                place=Place(topic_id="x", partition=0, first_offset=0, last_offset=0),
                rewards=(reward,),
                untrainable_steps=(),
                trainable_tokens=1,
                oldest_sync_index=sync_index,
            )
        )
    return ReadyBatch(
        run_id="r", channel="val", batch_seq=0, policy_version=1, sync_every=1, algorithm="cispo",
        groups=tuple(
            BatchGroup(group_id=f"g{key}", round=0, n=len(members), members=tuple(members))
            for key, members in groups.items()
        ),
        reward_weights={"rule/r": 2.0}, input_topic_id="c", input_partition=0, input_from=0,
        input_to=1, content_hash="", trainable_tokens=1, created_at_event_time=0,
    )  # fmt: skip


ROWS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.none() | st.integers(0, 2),
        st.none() | st.floats(-10, 10, allow_nan=False),
    ),
    max_size=20,
)


@given(ROWS, ROWS)
def test_each_trajectory_counts_once_for_the_version_that_sampled_it(a: Rows, b: Rows) -> None:
    batches = [batch(a), batch(b, len(a))]
    validations, newest = Validations(), dict[int, Validation]()
    for add in (batches[:1], batches[1:], batches):  # the last ones are a repetition
        newest |= {v.sync_index: v for v in validations.add(add)}
    expected: dict[int, list[float]] = {}
    for _, sync_index, value in (*a, *b):
        if sync_index is not None and value is not None:
            expected.setdefault(sync_index, []).append(2.0 * value)
    assert newest.keys() == expected.keys()
    for sync_index, rewards in expected.items():
        assert newest[sync_index].trajectories == len(rewards)
        assert newest[sync_index].mean == pytest.approx(sum(rewards) / len(rewards), abs=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20))
def test_with_groups_of_one_the_interval_is_that_of_the_mean(rewards: list[float]) -> None:
    n, mean = len(rewards), sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / (n - 1)
    got = summary(3, [[r] for r in rewards]).interval
    assert got == pytest.approx(1.96 * math.sqrt(variance / n), abs=1e-6)


def test_equal_members_of_a_group_tell_as_much_as_one() -> None:
    one, four = summary(0, [[0.0], [1.0]]), summary(0, [[0.0] * 4, [1.0] * 4])
    assert one.interval == pytest.approx(four.interval)
    assert summary(0, [[0.0, 1.0]]).metrics == {"val/reward_mean": 0.5, "val/trajectories": 2.0}

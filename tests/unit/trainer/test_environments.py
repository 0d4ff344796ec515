"""A batch that mixes environments: advantages are estimated in each alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_runs import MemoryWeightLog, begin, fetched

from clawstream.schemas.records import BatchGroup
from clawstream.schemas.settings import Settings, TrainerSettings
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.data.environments import by_environment
from clawstream.trainer.step import train_batch

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**trainer: object) -> TrainerSettings:
    return TrainerSettings.model_validate({"device": "cpu", "minibatches": 1, **trainer})


def in_environments(metadata: Sequence[bytes | None], seq: int = 0) -> FetchedBatch:
    """Return a batch whose groups have these metadata."""
    found = fetched(seq)
    group_of = {
        member.trajectory_id: i
        for i, group in enumerate(found.batch.groups)
        for member in group.members
    }
    trajectories = {
        name: replace(trajectory, metadata_json=metadata[group_of[name]])
        for name, trajectory in found.trajectories.items()
    }
    return replace(found, trajectories=trajectories)


NAMES = st.sampled_from([None, "math", "code", "games"])


@given(st.lists(NAMES, min_size=2, max_size=2))
def test_every_group_is_in_one_part_and_the_others_are_together(found: list[str | None]) -> None:
    batch = in_environments([orjson.dumps({"id": 1, "environment": name}) for name in found])
    parts = by_environment(batch.batch, batch.trajectories, ("math", "code"))
    expected: dict[str | None, list[str]] = {}
    for name, group in zip(found, batch.batch.groups, strict=True):
        expected.setdefault(None if name == "games" else name, []).append(group.group_id)
    assert {n: [g.group_id for g in part.groups] for n, part in parts.items()} == expected


@pytest.mark.parametrize("metadata", [None, b"", b"{", b"[1]", b"{}", b'{"environment": 1}'])
def test_metadata_without_an_environment_means_the_algorithm_of_the_run(
    metadata: bytes | None,
) -> None:
    batch = in_environments([metadata, metadata])
    assert by_environment(batch.batch, batch.trajectories, ("math",)) == {None: batch.batch}


def of_large_rewards(group: BatchGroup) -> BatchGroup:
    return replace(
        group,
        members=tuple(
            replace(m, rewards=tuple(replace(r, value=10 * (r.value or 0.0)) for r in m.rewards))
            for m in group.members
        ),
    )


def test_a_run_estimates_and_measures_each_environment_alone(
    model_dir: Path, tmp_path: Path
) -> None:
    """REINFORCE++ normalizes over the tokens of its own environment, as if it had the batch."""
    only, mixed = [b'{"environment": "math"}'] * 2, [b'{"environment": "math"}', None]
    found = []
    for names, metadata in ((["math"], mixed), (["math"], only), ([], mixed)):
        s = Settings.model_validate(
            {
                "run_id": "r",
                "data_dir": tmp_path / str(len(found)),
                "trainer": {
                    "model_path": model_dir, "device": "cpu", "minibatches": 1,
                    "environments": names,
                },
            }
        )  # fmt: skip
        log = MemoryWeightLog()
        run = begin(s, log)
        batch = in_environments(metadata)
        small, large = batch.batch.groups
        groups = (small, of_large_rewards(large))
        train_batch(
            run, replace(batch, batch=replace(batch.batch, algorithm="reinforce_pp", groups=groups))
        )
        run.publish()
        found.append(log.published[-1].metrics)
        run._checkpoints.wait()
    apart, one, without = found
    assert apart["groups"] == 2 and apart["members"] == 6
    assert apart["environment/math/reward_mean"] == 1.0
    assert one["loss"] == without["loss"] != apart["loss"]

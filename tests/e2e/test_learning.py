"""Seeded learning runs: every algorithm learns a task from its own samples, PPO with a critic."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning.experiments import ALGORITHMS
from benchmarks.learning.run import Experiment, learn
from benchmarks.learning.task import make_model

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


@pytest.mark.parametrize("experiment", ALGORITHMS, ids=lambda e: e.name)
def test_an_algorithm_learns_the_task(
    tmp_path: Path, warm_start: Path, experiment: Experiment
) -> None:
    result = learn(experiment, 0, warm_start, tmp_path)
    assert result.scores[0][1] < 0.4
    assert result.score >= 0.85, result.scores

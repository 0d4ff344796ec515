"""Training on an example raises its reward, and keeps it.

`clawstream up` and `clawstream flow run` at a learning rate that falls; docs/training-gets-worse.md
says what a constant and higher one does.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from support.arithmetic_model import make_arithmetic_model
from support.feed import Feed
from support.ports import free_port
from support.processes import Processes
from support.up import ENVIRON, ROOT, command, own_installation, up

from clawstream.schemas.settings import Settings

VERSIONS = 24
COMPARED = 4
"""Batches in a row whose mean rewards are compared."""
RISE, KEPT = 0.3, 0.9
"""Least rise from the first to the last batches; least share of the best that the last have."""
SEEDS = range(5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_arithmetic_model(tmp_path_factory.mktemp("model") / "m")


def settings_of(
    home: Path, model: Path, seed: int, reward: str, functions: dict[str, Any]
) -> Settings:
    return Settings.model_validate({
        **own_installation(home),
        "run_id": "examples",
        "jobs": {"reward_functions": functions},
        "admit": {"policy": {
            "group_size": 8, "batch_groups": 8, "reward_weights": {reward: 1.0},
            "drop_zero_variance": False,
        }},
        "trainer": {
            "model_path": model, "max_versions": VERSIONS, "lr": 2e-4, "lr_decay": "linear",
            "seed": seed,
        },
        "rollout": {
            "port": free_port(), "max_model_len": 256, "kv_cache_mb": 64,
            "tool_parser": "strict_tags", "tool_parser_plugin": ROOT / "demo" / "tool_parser.py",
        },
        "up": {"processes": ["broker", "gateway", "assemble", "reward", "admit", "trainer",
                             "rollout"]},
    })  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("reward", "functions"),
    [
        ("env/complete_trajectory", {}),
        ("rule/right", {"examples": [f"{ROOT}/examples/reward_functions.py:right@1"]}),
    ],
    ids=["reward-of-the-flow", "reward-function"],
)
def test_the_reward_of_an_example_rises_and_stays(
    tmp_path: Path, model: Path, seed: int, reward: str, functions: dict[str, Any]
) -> None:
    settings = settings_of(tmp_path, model, seed, reward, functions)
    with up(settings) as running, Processes(tmp_path / "logs") as processes:
        running.until_says("up", '"event": "up"', 600)
        example = f"{ROOT}/examples/arithmetic.py:arithmetic"
        words = ("flow", "run", example, f"data_dir={running.home}", "max_tokens=40")
        flow = processes.start("flow", command(*words), env=ENVIRON)
        feed = Feed(settings)

        def trained() -> bool:
            assert flow.poll() is None, processes.log("flow")
            return len(feed.versions()) > VERSIONS

        running.until(trained, f"{VERSIONS} versions", 1200)
        processes.stop(flow)
        versions = feed.versions()
        feed.close()
        running.stop()
    means = [version.metrics["reward_mean"] for version in versions[1:]]
    print(f"{reward}: rewards of the batches", [round(value, 2) for value in means])
    in_a_row = [mean(means[i : i + COMPARED]) for i in range(len(means) - COMPARED + 1)]
    print(f"{reward}, seed {seed}: first, best, last", in_a_row[0], max(in_a_row), in_a_row[-1])
    assert in_a_row[-1] - in_a_row[0] >= RISE
    assert in_a_row[-1] >= KEPT * max(in_a_row)

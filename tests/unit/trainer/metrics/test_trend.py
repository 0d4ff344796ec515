"""Falls of the reward are reported; noise, plateaus and slow learning are not."""

from __future__ import annotations

import random

import pytest

from clawstream.trainer.metrics.trend import WINDOW, reward_fall

# Two runs with a learning rate that is too high (docs/LOG.md, "runs that learn and forget").
FORGETS = (
    "11 23 47 55 59 55 75 59 70 64 73 50 64 86 69 69 44 47 42 66 50 55 44 44",
    "16 22 44 59 64 78 81 75 62 70 41 47 42 50 34 48 55 27 55 25 30 22 06 39",
)
"""Mean rewards in percent."""


def noisy(means: list[float], seed: int, noise: float = 0.08) -> list[float]:
    rng = random.Random(seed)
    return [mean + rng.gauss(0, noise) for mean in means]


def rewards_of(line: str) -> list[float]:
    return [int(word) / 100 for word in line.split()]


@pytest.mark.parametrize("line", FORGETS)
def test_a_run_that_forgets_is_told(line: str) -> None:
    rewards = rewards_of(line)
    fall = reward_fall(rewards)
    means = [sum(rewards[i : i + WINDOW]) / WINDOW for i in range(len(rewards) - WINDOW + 1)]
    assert fall == pytest.approx(max(means) - means[-1])


@pytest.mark.parametrize("seed", range(10))
def test_a_reward_that_falls_from_the_start_is_told(seed: int) -> None:
    assert reward_fall(noisy([0.8 - 0.02 * i for i in range(30)], seed)) is not None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "means",
    [
        [0.5] * 60,
        [min(0.9, 0.1 + 0.05 * i) for i in range(60)],
        [0.1 + 0.01 * i for i in range(60)],
    ],
    ids=["flat", "plateau", "slow"],
)
def test_noise_is_no_fall(means: list[float], seed: int) -> None:
    rewards = noisy(means, seed)
    assert all(reward_fall(rewards[: i + 1]) is None for i in range(len(rewards)))


def test_few_versions_or_equal_rewards_say_nothing() -> None:
    assert reward_fall([]) is None
    assert reward_fall([1.0] * (WINDOW - 1) + [0.0] * WINDOW) is None
    assert reward_fall([0.5] * 100) is None


def test_the_unit_of_the_reward_does_not_matter() -> None:
    rewards = rewards_of(FORGETS[1])
    fall = reward_fall(rewards)
    assert fall is not None
    assert reward_fall([1000 * r - 7 for r in rewards]) == pytest.approx(1000 * fall)

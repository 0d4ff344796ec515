"""Names of algorithms to functions, and users' own parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.schemas.algorithms import (
    ALGORITHMS,
    ESTIMATORS,
    LOSSES,
    AlgorithmSettings,
    reads_rewards,
    smallest_group,
)
from clawstream.schemas.errors import SettingsError
from clawstream.trainer.algorithms.registry import load, needs, specification


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_loads(name: str) -> None:
    algorithm = load(name, {}, ())
    assert callable(algorithm.advantage) and callable(algorithm.loss)


def test_every_part_is_used_or_can_be_chosen() -> None:
    for part in ESTIMATORS:
        assert load("grpo", {"advantage": part}, ()).advantage.__name__ == part
    for part in LOSSES:
        assert load("grpo", {"loss": part}, ()).loss.__name__ == part


def test_a_run_overrides_parts_and_numbers() -> None:
    got = specification("gspo", {"advantage": "rloo", "clip_high": 0.5})
    assert (got.advantage, got.loss) == ("rloo", "gspo")
    assert (got.settings.clip_low, got.settings.clip_high) == (3e-4, 0.5)


def test_a_function_of_the_users_own_is_loaded_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def mine(batch, settings):\n    return -batch.logprobs\n")
    algorithm = load("cispo", {"loss": "own.py:mine"}, (tmp_path,))
    assert algorithm.loss.__name__ == "mine" and algorithm.advantage.__name__ == "grpo"
    assert not algorithm.skips_zero_advantages
    with pytest.raises(SettingsError, match=r"trainer\.algorithm\.loss='own\.py:other'"):
        load("cispo", {"loss": "own.py:other"}, (tmp_path,))


def test_an_estimator_of_the_users_own_asks_for_columns(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def one(batch, settings): ...\n"
        "def two(batch, settings): ...\n"
        "def three(batch, settings): ...\n"
        "one.needs = {'teacher_logprobs', 'values'}\none.returns = two\n"
        "two.needs = {'values'}\nthree.needs = ['teacher']\n"
    )
    one = load("cispo", {"advantage": "own.py:one", "kl_coef": 0.1}, (tmp_path,))
    assert one.needs == {"teacher_logprobs", "values", "ref_logprobs"}
    assert one.returns is not None and one.returns.__name__ == "two"
    with pytest.raises(SettingsError, match=r"trainer\.algorithm\.advantage: it needs values"):
        load("cispo", {"advantage": "own.py:two"}, (tmp_path,))
    with pytest.raises(SettingsError, match=r"it needs teacher; a batch can have ref_logprobs"):
        load("cispo", {"advantage": "own.py:three"}, (tmp_path,))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"admit\.policy\.algorithm='magic': this trainer has"):
        specification("magic", {})
    with pytest.raises(SettingsError, match=r"trainer\.algorithm\.advantage='magic'"):
        specification("grpo", {"advantage": "magic"})


def test_the_columns_that_an_algorithm_reads() -> None:
    assert needs(ALGORITHMS["ppo"]) == {"values"}
    assert needs(ALGORITHMS["distillation"]) == {"teacher_logprobs"}
    assert needs(specification("grpo", {"kl_coef": 0.1})) == {"ref_logprobs"}
    assert not needs(ALGORITHMS["cispo"])


@pytest.mark.parametrize(
    ("overrides", "skips"),
    [
        ({}, True),
        ({"kl_coef": 0.1}, False),
        ({"kl_coef": 0.1, "kl_in": "reward"}, True),
        ({"entropy_coef": 0.1}, False),
        ({"loss": "dppo"}, False),
    ],
)
def test_sequences_without_advantage_are_skipped_where_they_add_nothing(
    overrides: dict[str, object], skips: bool
) -> None:
    assert load("grpo", overrides, ()).skips_zero_advantages is skips


def test_cispo_is_what_the_demo_and_the_defaults_train() -> None:
    s = ALGORITHMS["cispo"].settings
    assert s == AlgorithmSettings(std_offset=0.3, ratio_max=2.0, aggregation="token_mean")


@pytest.mark.slow
def test_the_maths_imports_only_torch_and_numpy() -> None:
    """So that it runs on a machine without Kafka, pydantic and the rest."""
    heavy = {"confluent_kafka", "pydantic", "faust", "structlog", "orjson", "fastapi"}
    code = (
        "import sys\nfrom clawstream.trainer.algorithms.registry import *\n"
        "before = 'torch' in sys.modules\n"
        "for name in ALGORITHMS: load(name, {}, ())\n"
        "print(before, *{m.partition('.')[0] for m in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    before, *modules = done.stdout.split()
    assert before == "False" and not set(modules) & heavy
    assert {"torch", "numpy", "clawstream"} <= set(modules)


def test_admission_knows_what_the_groups_of_an_algorithm_need() -> None:
    alone = {name for name in ALGORITHMS if smallest_group(name) == 1}
    assert alone == {
        *("distillation", "ppo", "ppo_steps", "reinforce_pp", "reward_weighted", "sft")
    }
    assert {name for name in ALGORITHMS if not reads_rewards(name)} == {"distillation", "sft"}
    assert smallest_group("of another release") == 1 and reads_rewards("of another release")

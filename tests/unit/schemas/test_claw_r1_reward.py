"""Claw-R1's section `reward` becomes reward functions and models of every run."""

from __future__ import annotations

from typing import Any

import pytest

from clawstream.runtime.process.config import load
from clawstream.schemas.errors import SettingsError


@pytest.mark.parametrize(
    ("words", "spec", "model"),
    [
        (["reward.type=rule"], "last_number@1", None),
        (["reward.rule_fn=exact_match"], "exact_match@1", None),
        (["reward.rule_fn=my.rewards.right"], "my.rewards:right@1", None),
        (["reward.rule_fn=my_rewards.py:right"], "my_rewards.py:right@1", None),
        (
            ["reward.type=disrm", "reward.model_path=/m", "reward.batch_size=8"], "disrm@1",
            {"type": "disrm", "model": "/m", "batch_size": 8, "raw": True, "url": None},
        ),
        (
            ["reward.type=genrm", "reward.model_path=m", "reward.url=http://j/v1",
             "reward.rubric=short"], "genrm@1", {"type": "genrm", "model": "m", "rubric": "short"},
        ),
        (
            ["reward.type=genrm", "reward.reward_loop_manager=my.custom.compute_reward"],
            "my.custom:compute_reward@1", None,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_type_works_in_every_mode(
    words: list[str], spec: str, model: dict[str, Any] | None, mode: str
) -> None:
    own = "jobs.reward_functions={mine: [exact_match@2]}"
    settings = load(overrides=[*words, own, f"rollout.mode={mode}"], environ={})
    assert dict(settings.jobs.reward_functions) == {"*": (spec,), "mine": ("exact_match@2", spec)}
    found = {name: it.model_dump() for name, it in settings.reward_models.items()}
    assert list(found) == ([] if model is None else [model["type"]])
    if model is not None:
        assert model.items() <= found[model["type"]].items()
    source = {"disrm": "model", "genrm": "judge"}[model["type"]] if model else "rule"
    name = spec.rpartition("@")[0].rpartition(":")[2]
    assert settings.required_rewards == (f"{source}/{name}",)


def test_read_twice_it_names_its_function_once() -> None:
    words = ["reward.type=rule", "jobs.reward_functions={'*': [last_number@1]}"]
    settings = load(overrides=words, environ={})
    assert dict(settings.jobs.reward_functions) == {"*": ("last_number@1",)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.type=model"], "it is rule, disrm or genrm"),
        (["reward="], "the section has keys"),
        (["reward=last_number"], "the section has keys"),
        (["reward.type=rule", "jobs.reward_functions={'*': exact_match@1}"], "reward_functions"),
        (["reward.type=disrm"], r"needs reward\.model_path"),
        (["reward.type=genrm", "reward.model_path=m"], "rubric"),
        (["reward.type=rule", "reward.model_path=m"], "does not use model_path"),
        (["reward.type=disrm", "reward.model_path=m", "reward.lr=1"], "lr"),
    ],
)
def test_what_cannot_work_is_an_error(words: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(overrides=words, environ={})

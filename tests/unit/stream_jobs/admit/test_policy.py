"""Policies: conversion from and to settings, publication at start, changes by a user."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import PolicySettings, Settings
from clawstream.stream_jobs.admit.policy import (
    Published,
    is_of_settings,
    next_policy,
    policy_of,
    policy_rejection,
    same_content,
    settings_of,
)
from clawstream.stream_jobs.admit.policy_log import changed_policy
from clawstream.trainer.settings_check import check_algorithm

SETTINGS = Settings(run_id="demo")


def with_policy(**changes: object) -> Settings:
    policy = PolicySettings.model_validate({**PolicySettings().model_dump(), **changes})
    return SETTINGS.model_copy(
        update={"admit": SETTINGS.admit.model_copy(update={"policy": policy})}
    )


def test_a_policy_becomes_settings_and_a_policy_again() -> None:
    full = with_policy(
        group_size=4,
        required_rewards=("rule/x", "human"),
        reward_weights={"rule/x": 0.5},
        reward_deadline_s=1.25,
        group_deadline_s=99.5,
        max_staleness=3,
        min_quality=0.25,
        min_step_quality=0.5,
        require_assessment=True,
        untrained_tags=("a",),
        train_outcomes=("completed",),
        batch_tokens=100,
        val_deadline_s=7.0,
        algorithm="rloo",
    )
    policy = policy_of(full, 3, 9)
    assert settings_of(policy) == full.admit.policy
    assert settings_of(policy).model_dump() == full.admit.policy.model_dump()
    assert is_of_settings(policy) and is_of_settings(dataclasses.replace(policy, published_by=None))


def test_a_person_changes_some_fields_and_the_rest_stays() -> None:
    policy = policy_of(with_policy(min_quality=0.25, max_staleness=3), 3, 9)
    made = changed_policy(
        SETTINGS,
        policy,
        {"batch_groups": "4", "max_staleness": "null", "required_rewards": "[human]"},
        "ann",
    )
    assert (made.run_id, made.policy_version, made.published_by) == ("demo", 4, "ann")
    told = dataclasses.replace(
        policy, batch_groups=4, max_staleness=None, required_rewards=("human",)
    )
    assert same_content(made, told) and not is_of_settings(made)


def configured(
    rewards: dict[str, list[str]] | None = None,
    quality: dict[str, list[str]] | None = None,
    **policy: Any,
) -> Settings:
    jobs = {"reward_functions": rewards or {}, "quality_functions": quality or {}}
    return Settings.model_validate({"run_id": "demo", "jobs": jobs, "admit": {"policy": policy}})


@pytest.mark.parametrize(
    ("functions", "policy", "required"),
    [
        ({}, {}, ()),
        (
            {"demo": ["exact_match@1", "mine.py:kind@2"], "*": ["last_number@1"]},
            {},
            ("rule/exact_match", "rule/kind"),
        ),
        ({"*": ["my.module:f@v1", "my.module:f@v2"]}, {}, ("rule/f",)),
        ({"other": ["exact_match@1"]}, {}, ()),
        (
            {"*": ["a.b:f@1", "a.b:g@1"]},
            {"reward_weights": {"rule/g": 1.0, "env/score": 1.0}},
            ("rule/g",),
        ),
        ({"*": ["a.b:f@1"]}, {"required_rewards": ["env"]}, ("env",)),
        ({"*": ["a.b:f@1"]}, {"required_rewards": [], "reward_weights": {"env/score": 1.0}}, ()),
    ],
)
def test_groups_wait_for_the_configured_reward_functions(
    functions: dict[str, list[str]], policy: dict[str, Any], required: tuple[str, ...]
) -> None:
    assert policy_of(configured(functions, **policy), 1, 0).required_rewards == required


@pytest.mark.parametrize(
    ("rules", "policy", "waits"),
    [
        ({"*": ["built_in"]}, {"min_quality": 0.5}, True),
        ({"demo": ["built_in"]}, {"min_step_quality": 0.5}, True),
        ({"*": ["built_in"]}, {}, False),
        ({}, {"min_quality": 0.5}, False),
        ({"x": ["built_in"]}, {"min_quality": 0.5}, False),
        ({}, {"require_assessment": True}, True),
        ({"*": ["built_in"]}, {"require_assessment": False}, False),
    ],
)
def test_groups_wait_for_an_assessment_that_decides(
    rules: dict[str, list[str]], policy: Any, waits: bool
) -> None:
    assert policy_of(configured(quality=rules, **policy), 1, 0).require_assessment is waits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rewards": {"*": ["exact_match@1"]}, "required_rewards": []},
            ("required_rewards is empty, but .*rule/exact_match"),
        ),
        (
            {"quality": {"*": ["built_in"]}, "min_quality": 0.5, "require_assessment": False},
            "require_assessment is false",
        ),
    ],
)
def test_a_policy_that_would_decide_before_the_functions_answer_is_refused(
    given: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        configured(**given)


def test_a_changed_policy_waits_for_the_functions_of_the_settings() -> None:
    mine = configured({"*": ["a.b:f@1"]}, {"*": ["built_in"]})
    before = policy_of(SETTINGS, 1, 0)
    made = changed_policy(mine, before, {"min_quality": "0.5"}, "ann")
    assert (made.required_rewards, made.require_assessment) == (("rule/f",), True)
    with pytest.raises(SettingsError, match="required_rewards is empty"):
        changed_policy(mine, before, {"required_rewards": "[]"}, "ann")


@pytest.mark.parametrize(
    ("said", "change", "required", "assessed"),
    [
        ({}, {"reward_weights": "{rule/g: 1.0}"}, ("rule/g",), True),
        ({}, {"min_quality": "null"}, ("rule/f", "rule/g"), False),
        ({}, {"batch_groups": "4"}, ("rule/f", "rule/g"), True),
        (
            {"required_rewards": ["rule/f", "rule/g"]},
            {"reward_weights": "{rule/g: 1.0}"},
            ("rule/f", "rule/g"),
            True,
        ),
        ({"required_rewards": ["env"]}, {"reward_weights": "{rule/g: 1.0}"}, ("env",), True),
        ({"require_assessment": True}, {"min_quality": "null"}, ("rule/f", "rule/g"), True),
    ],
)
def test_what_follows_from_the_functions_follows_in_a_changed_policy_too(
    said: dict[str, Any], change: dict[str, str], required: tuple[str, ...], assessed: bool
) -> None:
    mine = configured({"*": ["a.b:f@1", "a.b:g@1"]}, {"*": ["built_in"]}, min_quality=0.5, **said)
    made = changed_policy(mine, policy_of(mine, 1, 0), change, "ann")
    assert (made.required_rewards, made.require_assessment) == (required, assessed)


def test_a_policy_may_not_name_an_algorithm_that_the_trainer_lacks() -> None:
    before = policy_of(SETTINGS, 1, 0)
    with pytest.raises(
        SettingsError, match=r"admit\.policy\.algorithm='magic': this trainer has cispo"
    ):
        changed_policy(SETTINGS, before, {"algorithm": "magic"}, "ann", (check_algorithm,))
    assert (
        changed_policy(
            SETTINGS, before, {"batch_groups": "4"}, "ann", (check_algorithm,)
        ).batch_groups
        == 4
    )


def test_sync_mode_trains_the_newest_versions_own_samples() -> None:
    settings = Settings.model_validate({"run_id": "demo", "rollout": {"mode": "sync"}})
    policy = policy_of(settings, 1, 0)
    assert (policy.max_staleness, policy_of(SETTINGS, 1, 0).max_staleness) == (0, None)
    assert changed_policy(settings, policy, {"batch_groups": "4"}, "ann").max_staleness == 0
    with pytest.raises(SettingsError, match=r"max_staleness=2, but rollout\.mode=sync"):
        changed_policy(settings, policy, {"max_staleness": "2"}, "ann")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("min_quality", "2", "less than or equal to 1"),
        ("batch_groups", "many", "valid integer"),
        ("min_members", "9", ("min_members 9 is above group_size 8")),
        ("train_outcomes", "[won]", "admit.policy.train_outcomes"),
        ("train_outcomes", "[completed, replaced]", "another trajectory takes the place"),
        ("reward_deadline_s", "1e9", "admit.policy.reward_deadline_s=1e\\+09"),
        ("group_size", "1", ("min_members 2 is above group_size 1")),
        ("reward_weights", "{", "admit.policy.reward_weights"),
    ],
)
def test_a_wrong_change_names_its_field(name: str, text: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why) as e:
        changed_policy(SETTINGS, policy_of(SETTINGS, 1, 0), {name: text}, "ann")
    assert "admit.policy" in str(e.value)


def test_settings_are_published_when_they_have_changed_and_only_then() -> None:
    old, new = with_policy(batch_groups=3), with_policy(batch_groups=5)
    first = policy_of(old, 1, 0)
    assert next_policy(Published(None, None, False), policy_of(old, 1, 0)) == first
    assert next_policy(Published(first, first, True), policy_of(old, 2, 5)) is None
    assert next_policy(Published(first, first, True), policy_of(new, 2, 5)) == policy_of(new, 2, 5)


def test_what_a_person_has_set_stays_until_the_settings_change() -> None:
    old, new = with_policy(batch_groups=3), with_policy(batch_groups=5)
    first = policy_of(old, 1, 0)
    anns = changed_policy(old, first, {"batch_groups": "7"}, "ann")
    assert next_policy(Published(anns, first, True), policy_of(old, 3, 5)) is None
    assert next_policy(Published(anns, first, True), policy_of(new, 3, 5)) == policy_of(new, 3, 5)
    taken_over = with_policy(batch_groups=7)
    settled = next_policy(Published(anns, first, True), policy_of(taken_over, 3, 5))
    assert settled == policy_of(taken_over, 3, 5), (
        "said once more, by the settings: from now on they are what it is compared with"
    )
    anew = next_policy(Published(anns, first, False), policy_of(old, 3, 5))
    assert anew == dataclasses.replace(anns, policy_version=3, created_at=5), (
        "on a recreated topic it stays in force"
    )
    assert next_policy(Published(anns, None, True), policy_of(old, 3, 5)) == policy_of(old, 3, 5), (
        "settings never spoke yet"
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"reward_weights": {"env/a": math.nan}},
            ("reward_weights of 'env/a': nan is not in [-1e+06, 1e+06]"),
        ),
        (
            {"reward_weights": {"env/a": 1.0, "b": -1e300}},
            ("reward_weights of 'b': -1e+300 is not in [-1e+06, 1e+06]"),
        ),
        ({"batch_tokens": 0}, ("batch_tokens is 0, must be at least 1")),
        ({"batch_tokens": -5}, "batch_tokens is -5"),
        ({"max_trajectory_tokens": 0}, "max_trajectory_tokens is 0, must be at least 1"),
        ({"max_staleness": -1}, ("max_staleness is -1, must be at least 0")),
        ({"min_trainable_tokens": -1}, "min_trainable_tokens is -1"),
        ({"group_deadline_ms": -1}, "group_deadline_ms is -1"),
        ({"reward_deadline_ms": -(10**18)}, "reward_deadline_ms is -1000"),
        ({"val_deadline_ms": -1}, "val_deadline_ms is -1"),
        ({"group_size": 0}, ("group_size is 0, must be at least 1")),
        ({"min_quality": math.nan}, ("min_quality is nan, must be in")),
        ({"min_step_quality": 1.1}, "min_step_quality is 1.1"),
    ],
)
def test_a_policy_that_no_settings_could_say_is_not_obeyed(
    changes: dict[str, Any], why: str
) -> None:
    """Another program may have written the policy."""
    policy = policy_of(SETTINGS, 7, 0)
    assert policy_rejection(policy, None) is None
    rejection = policy_rejection(dataclasses.replace(policy, **changes), None)
    assert rejection is not None and rejection.startswith(f"policy 7: {why}")

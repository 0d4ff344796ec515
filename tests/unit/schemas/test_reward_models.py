"""What the settings of reward models decide for other processes."""

from __future__ import annotations

from typing import Any

import pytest

from clawstream.schemas.settings import Settings
from clawstream.schemas.settings.jobs import NEW_MESSAGES_BYTES, JobsSettings

JUDGE = {"type": "genrm", "url": "http://j/v1", "model": "m", "rubric": "r"}
NEXT = {**JUDGE, "per": "next_state"}
BEST = {**JUDGE, "per": "group"}
CLASSIFIER = {"type": "disrm", "model": "m", "template": "{conversation}"}


def jobs(*models: dict[str, Any], **settings: Any) -> JobsSettings:
    named = {f"m{i}": model for i, model in enumerate(models)}
    return JobsSettings.model_validate({"reward_models": named, **settings})


def test_messages_are_kept_for_models_that_read_them() -> None:
    assert jobs().new_messages_limit() == jobs(JUDGE, {"type": "code"}).new_messages_limit() == 0
    for reader in (NEXT, CLASSIFIER, {**JUDGE, "template": "{conversation}"}):
        assert jobs(JUDGE, reader).new_messages_limit() == NEW_MESSAGES_BYTES
    assert jobs(NEXT, new_messages_bytes=5).new_messages_limit() == 5


def test_without_messages_such_models_are_refused() -> None:
    with pytest.raises(ValueError, match="m1 reads messages: set new_messages_bytes"):
        jobs(JUDGE, NEXT, new_messages_bytes=0)


def test_rewards_of_the_next_state_have_its_source() -> None:
    both = jobs(JUDGE, NEXT)
    assert [both.reward_name(f"m{i}@1") for i in (0, 1)] == ["judge/m0", "next_state/m1"]


def test_groups_are_compared_where_a_run_names_such_a_judge() -> None:
    found = jobs(JUDGE, BEST, reward_functions={"r": ("m0@1",), "*": ("m1@1", "exact_match@1")})
    assert found.compares_groups and not jobs(BEST, reward_functions={"r": ()}).compares_groups
    assert [found.compares(f"{name}@1") for name in ("m0", "m1", "exact_match")] == [0, 1, 0]
    assert Settings(jobs=found).required_rewards == ("judge/m1", "rule/exact_match")


def test_a_comparison_ends_before_the_deadline_of_its_group() -> None:
    found: dict[str, Any] = {
        "jobs": jobs(BEST, reward_functions={"*": ("m0@1",)}),
        "functions": {"timeout_s": 30},
    }
    policy: dict[str, Any] = {"admit": {"policy": {"group_deadline_s": 35.5}}}
    assert Settings.model_validate({**found, **policy}).comparison_wait_s == 0.5
    policy["admit"]["policy"]["group_deadline_s"] = 35
    with pytest.raises(ValueError, match=r"group_deadline_s=35 must exceed functions\.timeout_s"):
        Settings.model_validate({**found, **policy})

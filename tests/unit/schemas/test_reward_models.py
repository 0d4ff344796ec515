"""What the settings of reward models decide for other processes."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.settings.jobs import NEW_MESSAGES_BYTES, JobsSettings

JUDGE = {"type": "genrm", "url": "http://j/v1", "model": "m", "rubric": "r"}
NEXT = {**JUDGE, "per": "next_state"}
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

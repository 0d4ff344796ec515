"""Rewards with settings of their own: code tests, generative judges, discriminative models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from schemas.records.parts import RewardSource
from schemas.settings.base import Count, Positive, Section


class CodeTests(Section):
    """The answer's code against the tests of its task, in a sandbox."""

    type: Literal["code"]
    timeout_s: Positive = Field(
        10.0, description="longest time of all tests of an answer; below functions.timeout_s"
    )
    memory_mb: Count = Field(512, description="memory of the program and all that it starts")
    processes: Count = Field(16, description="processes and threads of the program")
    partial: bool = Field(False, description="reward the share of passed tests")


RewardModel = CodeTests
SOURCES: Mapping[str, RewardSource] = {"code": "rule"}
"""Type of a reward model to the source that its rewards carry."""

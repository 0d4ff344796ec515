"""Check the reward functions and quality rules of the settings. Needs no Kafka."""

from __future__ import annotations

from clawstream.rewards.results import rules_of
from clawstream.runtime.functions.pool import FunctionPool
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.reward.assessments import quality_rules_of


def check_reward_functions(settings: Settings) -> None:
    """Resolve every reward function; a user's file is loaded in a child process.

    Raises SettingsError that names the setting.
    """
    with FunctionPool(settings.functions) as pool:
        rules_of(settings, pool.find)


def check_quality_functions(settings: Settings) -> None:
    """Resolve every quality rule; a user's file is loaded in a child process.

    Raises SettingsError that names the setting.
    """
    with FunctionPool(settings.functions) as pool:
        quality_rules_of(settings.jobs.quality_functions, pool.find)


CHECKS = (check_reward_functions, check_quality_functions)

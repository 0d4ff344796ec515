"""Check the reward models of the settings that compare groups. Needs no Kafka."""

from __future__ import annotations

from clawstream.rewards.results import group_rules_of
from clawstream.runtime.functions.pool import FunctionPool
from clawstream.schemas.settings import Settings


def check_comparisons(settings: Settings) -> None:
    """Make the function of every reward model that compares groups, in a child process.

    Raises SettingsError that names the setting.
    """
    with FunctionPool(settings.functions) as pool:
        group_rules_of(settings, pool.find)


CHECKS = (check_comparisons,)

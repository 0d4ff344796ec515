"""How many examples a property test tries."""

from hypothesis import settings

FULL = 100
"""Hypothesis' own default, for which the numbers in the tests are written."""


def examples(full: int) -> int:
    """Scale a number of examples with the active profile, to at least five.

    Args:
        full: examples under a profile with `max_examples=100`, such as `searching`.
    """
    return max(5, full * settings.default.max_examples // FULL)

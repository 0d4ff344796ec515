"""The texts that a classifier rates: the templates of its settings, filled from a trajectory."""

from __future__ import annotations

from clawstream.rewards.answer import own_steps
from clawstream.rewards.template import filled
from clawstream.schemas.records import Trajectory
from clawstream.schemas.settings.reward_models import Classifier


def texts(settings: Classifier, trajectory: Trajectory) -> tuple[str | None, str]:
    """Return the query, if there is a template for it, and the text to rate.

    Raises:
        ValueError: The trajectory lacks what the templates need.
    """
    steps = own_steps(trajectory)
    query = None if settings.query is None else filled(settings.query, trajectory, steps)
    return query, filled(settings.template, trajectory, steps)

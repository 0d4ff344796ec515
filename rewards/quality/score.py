"""The result type of quality rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from schemas.records import Trajectory


class Score(NamedTuple):
    """A score of a trajectory or a step.

    value: In [0, 1]; 1.0 is faultless. step: Id of the scored step; None: the whole trajectory.
    evidence: What the rule found.
    """

    value: float
    evidence: str | None = None
    step: str | None = None


QualityRule = Callable[[Trajectory], Iterable[Score] | Mapping[str, float] | float | None]
"""Scores of a closed trajectory: as `Score`s, as one number for the whole, or as numbers by step
id.

What is not named has nothing wrong with it, 1.0. None: nothing is wrong. Raising means that the
rule counts for nothing here, with the reason on the record.
"""

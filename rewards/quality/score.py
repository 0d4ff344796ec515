"""The result type of quality rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from clawstream.schemas.records import Trajectory


class Score(NamedTuple):
    """A score of a trajectory or a step.

    value: In [0, 1]; 1.0 means no defect. evidence: Description of the defect. step: Id of the
    scored step; None for the whole trajectory.
    """

    value: float
    evidence: str | None = None
    step: str | None = None


QualityRule = Callable[[Trajectory], Iterable[Score] | Mapping[str, float] | float | None]
"""Returns the scores of a closed trajectory: `Score`s, one number for the whole, or numbers by step
id.

Steps without a score have 1.0; None means no defect. If the rule raises, it is ignored for this
trajectory, and the reason is recorded.
"""

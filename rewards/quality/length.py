"""Detect replies that are too short or too long, and conversations that are too long."""

from __future__ import annotations

from collections.abc import Iterator

from rewards.quality.score import Score
from schemas.records import Trajectory

SHORTEST = 2
"""Tokens of a reply: a single one is an end and nothing before it."""
LONGEST = 16_384
MOST_STEPS = 200
BYTES_A_TOKEN = 4
"""For replies whose tokens are not known: of English text, and a little less of code."""


def length(trajectory: Trajectory) -> Iterator[Score]:
    """Falls in proportion: a reply of twice the longest has 0.5."""
    for step in trajectory.steps:
        tokens = step.response_tokens
        if step.segment is None:
            tokens = max(SHORTEST, len(step.response_json) // BYTES_A_TOKEN)
        if tokens < SHORTEST:
            yield Score(
                tokens / SHORTEST, f"{tokens} tokens, {SHORTEST} are the least", step.step_id
            )
        elif tokens > LONGEST:
            yield Score(LONGEST / tokens, f"{tokens} tokens, more than {LONGEST}", step.step_id)
    if len(trajectory.steps) > MOST_STEPS:
        yield Score(
            MOST_STEPS / len(trajectory.steps),
            f"{len(trajectory.steps)} steps, more than {MOST_STEPS}",
        )

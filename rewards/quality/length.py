"""Detect replies that are too short or too long, and conversations that are too long."""

from __future__ import annotations

from collections.abc import Iterator

from clawstream.rewards.quality.score import Score
from clawstream.schemas.records import Trajectory

SHORTEST = 2
"""Tokens of a reply: a single token is an end token without a text."""
LONGEST = 16_384
MOST_STEPS = 200
BYTES_PER_TOKEN = 4
"""Estimate for replies without token ids: English text has about 4, code a little less."""


def length(trajectory: Trajectory) -> Iterator[Score]:
    """Score in proportion to the limit: a reply of twice LONGEST has 0.5."""
    for step in trajectory.steps:
        tokens = step.response_tokens
        if step.segment is None:
            tokens = max(SHORTEST, len(step.response_json) // BYTES_PER_TOKEN)
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

"""Detect replies with loops, and agents that repeat a reply.

A loop is a range in which a period of tokens is repeated, at least three times in all. The search
starts at a few places of the reply and looks for a repetition of the 16 tokens there. So a reply
without loops costs a few byte searches, whatever its length. A loop of less than 120 tokens, or of
an eighth of a long reply, may be missed.
"""

from __future__ import annotations

from collections.abc import Iterator

from clawstream.rewards.quality.score import Score
from clawstream.schemas.conversation import loaded, texts_in
from clawstream.schemas.records import Trajectory, TrajectoryStep

ID_BYTES = 4
WINDOW = 16
"""Tokens (or bytes of text / 4) that must be repeated."""
LEAST = 48
"""Minimum length of a loop in tokens: shorter ones are table rules or blank lines."""
STRIDE = 64
"""Minimum distance in tokens between search places."""
PLACES = 8
"""Maximum number of search places."""
SAME = 2
"""Equal previous replies of an agent that is stuck; one may be a poll."""


def repetition(trajectory: Trajectory) -> Iterator[Score]:
    """Score 1 - share of loops in a reply, and 1/k for a reply given k times in a row before."""
    replies: dict[int, bytes] = {}
    in_a_row: dict[int, int] = {}
    for step in trajectory.steps:
        if step.segment is not None:
            data = trajectory.segments[step.segment].token_ids
            looped = longest_loop(data, ID_BYTES)
        else:
            data = _text(step)
            looped = longest_loop(data, 1)
        if looped:
            yield Score(
                1 - looped / len(data), f"{looped} of {len(data)} bytes are a loop", step.step_id
            )
        replies[step.index] = data
        if step.parent is not None and len(data) >= WINDOW and replies.get(step.parent) == data:
            times = in_a_row[step.index] = in_a_row.get(step.parent, 0) + 1
            if times >= SAME:
                yield Score(
                    1 / times, f"the same reply {times} times in a row before", step.step_id
                )


def longest_loop(data: bytes, unit: int) -> int:
    """Return the length in bytes of the longest loop found; 0 without one.

    unit: bytes per token id, or 1 for text.
    """
    window = WINDOW * ID_BYTES
    last = len(data) - 2 * window
    if last < 0:
        return 0
    stride = max(STRIDE * ID_BYTES, last // PLACES // ID_BYTES * ID_BYTES)
    best, at = 0, 0
    while at <= last:
        again = data.find(data[at : at + window], at + unit)
        if again >= 0 and (again - at) % unit == 0:
            begin, end = _extent(data, at, again - at)
            best, at = max(best, end - begin), max(at, end - window)
        at += stride
    return best


def _extent(data: bytes, at: int, period: int) -> tuple[int, int]:
    """Return the range around `at` with this period, in whole periods; empty if it is no loop."""
    part = data[at : at + period]
    begin, end = at, at + period
    while data[end : end + period] == part:
        end += period
    while begin >= period and data[begin - period : begin] == part:
        begin -= period
    loop = end - begin >= max(3 * period, LEAST * ID_BYTES)
    return (begin, end) if loop else (at, at)


def _text(step: TrajectoryStep) -> bytes:
    if len(step.response_json) < 2 * WINDOW * ID_BYTES:
        return b""
    try:
        return "\n".join(texts_in(loaded(step.response_json))).encode("utf-8", "surrogatepass")
    except ValueError:
        return step.response_json

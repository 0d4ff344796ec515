"""The segments of a trajectory, rebuilt from steps in any order, equal those of assemble."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from support.export_lake import trajectory, turn

from clawstream.export.segments import segments_of

TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.integers(0, 4), TOKENS, TOKENS), min_size=1, max_size=6), st.randoms())
def test_segments_come_again(
    turns: list[tuple[int, list[int], list[int]]], shuffle: random.Random
) -> None:
    """Each turn continues an earlier one, or starts a new one."""
    paths: list[list[int]] = [[]]
    steps = []
    for number, (earlier, more, response) in enumerate(turns):
        prompt = [*paths[earlier % len(paths)], *more]
        paths.append([*prompt, *response])
        steps.append(turn("k", number, prompt, response))
    whole = trajectory("k", steps, 0, "g")
    shuffled = list(whole.steps)
    shuffle.shuffle(shuffled)
    assert segments_of(shuffled, {s.step_id: s for s in steps}) == whole.segments


def test_a_step_without_tokens_is_no_segment() -> None:
    steps = [turn("k", 0, [1], [2]), turn("k", 1, [1, 2, 3], [4])]
    whole = trajectory("k", steps, 0, "g")
    (environment, policy) = segments_of(whole.steps, {steps[0].step_id: steps[0]})
    assert (environment.token_ids, policy.token_ids) == (b"\1\0\0\0", b"\2\0\0\0")

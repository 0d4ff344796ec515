"""Rebuild the tokens of a closed trajectory from its steps in the lake. Pure.

The table `trajectories` has no tokens: `steps` has them. The segment tree is a function of the
prompts and responses in log order, so the tree of assemble comes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from clawstream.schemas.records import Segment, Step, TrajectoryStep
from clawstream.stream_jobs.assemble.payload.cache import payload_of
from clawstream.stream_jobs.assemble.payload.segment_tree import SampledTokens, build
from clawstream.stream_jobs.assemble.payload.trainability import trainability


def segments_of(
    steps: Sequence[TrajectoryStep], recorded: Mapping[str, Step]
) -> tuple[Segment, ...]:
    """Return the segments of a trajectory, parents first.

    Args:
        steps: of the trajectory, in any order.
        recorded: step id to the recorded step; one that is absent has no tokens.
    """
    in_log_order = sorted(steps, key=lambda step: step.offset)
    tree = build([_tokens(step, recorded.get(step.step_id)) for step in in_log_order])
    recorded_index = {
        node.index: step.index for node, step in zip(tree.nodes, in_log_order, strict=True)
    }
    return tuple(
        segment
        if segment.step_index is None
        else replace(segment, step_index=recorded_index[segment.step_index])
        for segment in tree.segments
    )


def _tokens(step: TrajectoryStep, recorded: Step | None) -> SampledTokens | None:
    if recorded is None:
        return None
    payload = payload_of(recorded, trainability(recorded))
    if not payload.tokens:
        return None
    return SampledTokens(
        payload.prompt,
        payload.response,
        payload.logprobs,
        payload.versions,
        counts="retried" not in step.marks,
    )

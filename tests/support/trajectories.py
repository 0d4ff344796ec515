"""Finished trajectories as reward functions get them."""

from __future__ import annotations

from typing import Any

import orjson

from clawstream.schemas.records import Trajectory, TrajectoryStep


def answered(*answers: str, **metadata: Any) -> Trajectory:
    """Return a trajectory with one step for each answer; the ids of the steps are k~0.0, k~1.0.

    It has no tokens. metadata: of its group's task.
    """
    steps = tuple(
        TrajectoryStep(
            step_id=f"k~{i}.0", index=i, status="ok", drift="root", prompt_tokens=1,
            response_tokens=1, response_json=orjson.dumps({"content": answer}), trainable=True,
            offset=i,
        )
        for i, answer in enumerate(answers)
    )  # fmt: skip
    return Trajectory(
        run_id="r", trajectory_key="k", trajectory_id="k", group_id="g", channel="train",
        outcome="completed", opened_at=0, closed_at=1, metadata_json=orjson.dumps(metadata),
        part=0, parts=1, segments=(), steps=steps,
    )  # fmt: skip

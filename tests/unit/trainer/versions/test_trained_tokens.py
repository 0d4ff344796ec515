"""What is recorded of each trained token: sequences and their passes in, records out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.schemas.records import Segment, Trajectory, TrajectoryStep
from clawstream.schemas.tokens import pack_ids, pack_logprobs, unpack_logprobs
from clawstream.trainer.data.sequences import TrainingSequence, sequences_of
from clawstream.trainer.model.measurement import FirstPass
from clawstream.trainer.versions.trained_tokens import TrainedStep, is_recorded, trained_steps

Tree = list[tuple[int, int]]
"""(index of the parent step or -1, number of response tokens) of each step."""


def trajectory(tree: Tree) -> Trajectory:
    """Return a trajectory whose sampled ids count up, each with logprob -id / 8."""
    segments: list[Segment] = []
    said: list[int] = []
    token = 1
    for index, (parent, length) in enumerate(tree):
        above = said[parent] if parent >= 0 else None
        segments.append(Segment(parent=above, token_ids=pack_ids([token])))
        sampled = range(token + 1, token + 1 + length)
        segments.append(
            Segment(
                parent=len(segments) - 1,
                step_index=index,
                token_ids=pack_ids(sampled),
                logprobs=pack_logprobs([-i / 8 for i in sampled]),
            )
        )
        said.append(len(segments) - 1)
        token += 1 + length
    steps = tuple(
        TrajectoryStep(
            step_id=f"k~{index}.0", index=index, status="ok", drift="clean", prompt_tokens=0,
            response_tokens=length, response_json=b"{}", trainable=True, offset=index,
        )
        for index, (_, length) in enumerate(tree)
    )  # fmt: skip
    return Trajectory(
        run_id="r", trajectory_key="k", trajectory_id="k~1", group_id="g", channel="train",
        outcome="completed", opened_at=0, closed_at=1, part=0, parts=1, segments=tuple(segments),
        steps=steps,
    )  # fmt: skip


def sampled(sequence: TrainingSequence) -> np.ndarray:
    return sequence.tokens.logprobs[sequence.tokens.mask]


def recorded(
    of: Trajectory, sequences: list[TrainingSequence], passes: list[FirstPass | None]
) -> list[TrainedStep]:
    trained = zip(sequences, passes, strict=True)
    return list(trained_steps(trained, {of.trajectory_id: of}, 7))


def test_a_redacted_token_has_no_value_and_a_step_without_a_pass_no_log_probabilities() -> None:
    whole = trajectory([(-1, 3), (0, 2)])
    hidden = pack_logprobs([-0.25, math.nan, -0.5])
    segments = list(whole.segments)
    segments[1] = replace(segments[1], logprobs=hidden)
    whole = replace(whole, segments=tuple(segments))
    (sequence,) = sequences_of(whole, ())
    sequence = replace(sequence, advantages=np.array([1, 2, 3, 4], np.float32))
    values = np.array([-1, -2, -math.inf, -4], np.float32)
    first, second = recorded(whole, [sequence], [FirstPass(values, 2)])
    assert first.step_id == "k~0.0" and second.step_id == "k~1.0"
    assert unpack_logprobs(first.logprobs or b"") == pytest.approx([-1, math.nan, -2], nan_ok=True)
    assert unpack_logprobs(first.advantages) == pytest.approx([1, math.nan, 2], nan_ok=True)
    assert unpack_logprobs(second.logprobs or b"") == [-math.inf, -4.0]
    record = second.record("r/8.0")
    assert (record.version_id, record.batch_seq, record.updates) == ("r/8.0", 7, 2)
    assert (record.run_id, record.trajectory_key, record.trajectory_id) == ("r", "k", "k~1")
    idle = recorded(whole, [sequence], [None])
    assert [(s.updates, s.logprobs) for s in idle] == [(None, None)] * 2


def test_an_excluded_step_has_no_record() -> None:
    whole = trajectory([(-1, 2), (0, 1)])
    (sequence,) = sequences_of(whole, ["k~0.0"])
    sequence = replace(sequence, advantages=np.ones(1, np.float32))
    (only,) = recorded(whole, [sequence], [FirstPass(np.array([-3], np.float32), 0)])
    assert only.step_id == "k~1.0"


@given(
    st.lists(st.tuples(st.integers(-1, 20), st.integers(1, 5)), min_size=1, max_size=8).map(
        lambda steps: [(min(parent, index - 1), n) for index, (parent, n) in enumerate(steps)]
    )
)
def test_each_sampled_token_of_a_tree_is_recorded_once_at_its_place(tree: Tree) -> None:
    whole = trajectory(tree)
    sequences = [
        replace(sequence, advantages=-sampled(sequence)) for sequence in sequences_of(whole, ())
    ]
    passes: list[FirstPass | None] = [FirstPass(sampled(s) / 2, 0) for s in sequences]
    found = {s.step_id: s for s in recorded(whole, sequences, passes)}
    assert len(found) == len(tree)
    for index, (_, length) in enumerate(tree):
        engine = np.frombuffer(whole.segments[2 * index + 1].logprobs or b"", "<f4")
        record = found[f"k~{index}.0"]
        assert len(engine) == length
        assert unpack_logprobs(record.logprobs or b"") == (engine / 2).tolist()
        assert unpack_logprobs(record.advantages) == (-engine).tolist()


@given(st.floats(0, 1))
def test_a_share_of_trajectories_is_recorded(share: float) -> None:
    names = [f"task-{n}" for n in range(500)]
    found = sum(is_recorded(name, share) for name in names) / len(names)
    assert found == pytest.approx(share, abs=0.08)
    assert all(is_recorded(name, 1.0) for name in names)
    assert not any(is_recorded(name, 0.0) for name in names)

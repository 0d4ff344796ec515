"""Seeded runs: each algorithm learns to say the rewarded token from samples one version old."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.sequences import Tokens, TrainedMember, TrainingSequence
from clawstream.trainer.data.view import batch_view, with_advantages
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import update

PROMPT, GOOD, GROUPS, MEMBERS, BATCHES = (2, 9, 10), 17, 4, 16, 30
pytestmark = pytest.mark.usefixtures("one_thread")


def probabilities(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return torch.softmax(policy.model(torch.tensor([PROMPT])).logits[0, -1], -1)


def sampled(name: str, token: int, logprob: float) -> TrainingSequence:
    n = len(PROMPT) + 1
    tokens = Tokens(
        np.array([*PROMPT, token], np.int32),
        np.arange(n) == n - 1,
        np.full(n, logprob, np.float32),
        np.full(n, math.nan, np.float32),
        np.full(n, None, object),
        np.zeros(n, np.int32),
    )
    return TrainingSequence(name, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "cispo",
        "dapo",
        "dppo",
        "dr_grpo",
        "grpo",
        "gspo",
        "maxrl",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "reward_weighted",
        "rloo",
        "ppo",
        "distillation",
    ],
)
def test_an_algorithm_learns(model_dir: Path, name: str) -> None:
    """The values of the critic for `ppo` are the rate of success of the sampler; the teacher of
    `distillation` gives the good token nine tenths.
    """
    # One token: a fixed length of one. GSPO's bounds would stop each step after its first change.
    overrides = {"dr_grpo": {"fixed_length": 1}, "gspo": {"clip_low": 0.2, "clip_high": 0.2}}
    algorithm = load(name, overrides.get(name, {}), ())
    s = TrainerSettings.model_validate({"device": "cpu", "lr": 2e-3, "minibatches": 2})
    policy, generator = Policy(model_dir, s), torch.Generator().manual_seed(0)
    before = sampler = probabilities(policy)
    for seq in range(BATCHES):
        tokens = torch.multinomial(
            sampler, GROUPS * MEMBERS, replacement=True, generator=generator
        ).tolist()
        logprobs = sampler.log().tolist()
        sequences = [sampled(str(i), t, logprobs[t]) for i, t in enumerate(tokens)]
        members = [
            TrainedMember(
                trajectory_id=str(i),
                group=i // MEMBERS,
                reward=float(t == GOOD),
                steps=(0,),
                step_rewards={},
            )
            for i, t in enumerate(tokens)
        ]
        view = batch_view(sequences, members, "r", 0)
        others = math.log(0.1 / (len(sampler) - 1))
        teacher = np.array([math.log(0.9) if t == GOOD else others for t in tokens])
        view = replace(
            view, values=np.full(len(tokens), sampler[GOOD].item()), teacher_logprobs=teacher
        )
        sampler = probabilities(policy)
        advantages = algorithm.advantage(view, algorithm.settings)
        update(policy, with_advantages(sequences, advantages), seq, algorithm, s.lr, None)
    after = probabilities(policy)[GOOD].item()
    assert before[GOOD].item() < 0.2
    assert after > (0.6 if name == "distillation" else 0.85), after

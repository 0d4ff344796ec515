"""An update computed again from the lake's table `steps`, in plain torch.

Nothing of the trainer is used for it: neither segments nor sequences, advantages, losses or passes.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from deltalake import DeltaTable
from support.assemble import InMemoryPartition, session, step
from support.small_lake import SmallLake
from support.trainer_runs import ANY_ID
from transformers import AutoModelForCausalLM

from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    ReadyBatch,
    RewardValue,
    Sampling,
    Step,
    Trajectory,
    VersionSpan,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_logprobs
from clawstream.stream_jobs.assemble.state.trajectories import STEPS
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.sequences import sequences_of_batch
from clawstream.trainer.data.view import batch_view, with_advantages
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import update

Gradients = dict[str, torch.Tensor]
Turn = tuple[list[int], list[int], dict[str, Any]]
"""Prompt, reply, and fields of the step."""
REWARDS = (1.0, 0.0, 0.25, 0.75)


def rebuilt(table: Path, model_dir: Path, rewards: dict[str, float]) -> tuple[float, Gradients]:
    """Return loss and gradient of one CISPO step over one group, from rows of `steps`.

    A row is one forward pass of its own: prompt and reply, with the loss on the reply.

    Args:
        table: of `steps`.
        model_dir: of the weights before the update.
        rewards: by trajectory key; the keys are the group.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    values = torch.tensor(list(rewards.values()))
    scale = values.std() + 0.3
    losses = []
    for row in DeltaTable(table).to_pyarrow_table().to_pylist():
        prompt, reply = row["prompt_token_ids"], row["response_token_ids"]
        logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / row["sampling"]["temperature"]).log_softmax(-1)
        now = logprobs[torch.arange(len(reply)), torch.tensor(reply)]
        ratio = (now.detach() - torch.tensor(row["response_logprobs"])).exp().clamp(max=2.0)
        advantage = (rewards[row["trajectory_key"]] - values.mean()) / scale
        losses.append(-ratio * advantage * now)
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def trained(
    trajectories: dict[str, Trajectory], model_dir: Path, rewards: dict[str, float]
) -> tuple[float, Gradients]:
    """Return loss and gradient of the trainer's update."""
    members = tuple(
        BatchMember(
            trajectory_id=key, trajectory_key=key, revision=0, untrainable_steps=(),
            trainable_tokens=1, place=Place(topic_id="p", partition=0, first_offset=0,
            last_offset=0), rewards=(RewardValue(source="env", name="score",
            function_version="1", value=reward, reward_revision=0),),
        )
        for key, reward in rewards.items()
    )  # fmt: skip
    batch = ReadyBatch(
        run_id="r", channel="train", batch_seq=0, policy_version=0, sync_every=1,
        groups=(BatchGroup(group_id="g", round=0, n=len(members), members=members),),
        algorithm="cispo", reward_weights={}, input_topic_id="c", input_partition=0, input_from=0,
        input_to=0, content_hash="", trainable_tokens=1, created_at_event_time=0,
    )  # fmt: skip
    algorithm = load("cispo", {}, ())
    settings = Settings.model_validate(
        # No clipping, one step, and passes of several sizes.
        {"trainer": {"minibatches": 1, "max_grad_norm": 1e9, "micro_batch_tokens": 24}}
    ).trainer
    policy = Policy(model_dir, settings)
    data = sequences_of_batch(
        batch, trajectories, algorithm.smallest_group, algorithm.rewards, ANY_ID
    )
    view = batch_view(data.sequences, data.members, "r", 5)
    sequences = with_advantages(data.sequences, algorithm.advantage(view, algorithm.settings))
    (done,) = update(policy, sequences, 0, algorithm, 1e-3, None).steps
    assert done.loss is not None
    gradients = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    return done.loss, gradients


def at(temperature: float) -> dict[str, Any]:
    how = Sampling(
        source="engine", temperature=temperature, top_p=1.0, top_k=0, min_p=0.0,
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    return {"sampling": how}


def spans(*ends: int) -> dict[str, Any]:
    """Return versions that follow each other at these reply tokens."""
    found = [
        VersionSpan(version=f"r/{3 + i}.0", start=start, end=end)
        for i, (start, end) in enumerate(pairwise((0, *ends)))
    ]
    return {"versions": tuple(found)}


def turns(kind: str, m: int) -> list[Turn]:
    """Return the turns of member m of a group."""
    a, b, c = [8 + m, 9, 10 + m], [11, 12 + m], [13 + m, 14, 15, 9 + m]
    linear: list[Turn] = [([2, 5], a, {}), ([2, 5, *a, 6, 7], b, {})]
    linear.append(([2, 5, *a, 6, 7, *b, 4], c, {}))
    match kind:
        case "linear":
            return linear
        case "forked":
            return [*linear, ([2, 5, *a, 7, 7], [16, 17 + m], {}), ([2, 6], [18 + m], {})]
        case "mixed versions":
            each = (spans(1, 3), spans(2), spans(1, 2, 4))
        case _:
            each = (at(0.5 + 0.25 * m), at(1.0), at(1.5))
    return [(prompt, reply, more) for (prompt, reply, _), more in zip(linear, each, strict=True)]


def steps_of(kind: str, key: str, m: int) -> list[Step]:
    made = []
    for n, (prompt, reply, more) in enumerate(turns(kind, m)):
        sampled = pack_logprobs([-2.0 - 0.25 * ((n + m + i) % 9) for i in range(len(reply))])
        made.append(step(key, n, prompt, reply, response_logprobs=sampled, **{**at(1.0), **more}))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "forked", "mixed versions", "mixed temperatures"])
def test_an_update_from_rows_of_the_lake_equals_the_trainers(
    tmp_path: Path, model_dir: Path, kind: str
) -> None:
    rewards = {f"t{m}": reward for m, reward in enumerate(REWARDS)}
    lake = SmallLake(settings := Settings(data_dir=tmp_path))
    assemble = InMemoryPartition()
    for m, key in enumerate(rewards):
        steps = steps_of(kind, key, m)
        lake.put("steps", "SS", *steps)
        assemble.feed(*((STEPS, 0, s) for s in steps), (STEPS, 1, session(key, "completed")))
    trajectories = assemble.trajectories
    assert all(s.trainable for t in trajectories.values() for s in t.steps)
    if kind == "forked":
        parents = [s.parent for s in trajectories["t0"].segments]
        assert len(parents) > len(set(parents)) + 1, "not a tree"
    loss, gradients = trained(trajectories, model_dir, rewards)
    expected, plain = rebuilt(Path(settings.lake_uri) / "steps", model_dir, rewards)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        error = (gradient - plain[name]).norm() / plain[name].norm()
        assert error < 1e-4, name

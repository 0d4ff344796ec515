"""Models in the shapes of published ones train: `clawstream up` with a model and a client loop.

Each run publishes three versions after the initial one, and a real vLLM loads each of them. One of
the two groups of a batch is of an environment with an algorithm of its own.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI
from support.feed import Feed
from support.model_families import write_family
from support.ports import free_port
from support.up import ROOT, Up, own_installation, up

from clawstream.schemas.ids import parse_version
from clawstream.schemas.records import Step, TrainedTokens, Trajectory, WeightVersion, WorkerStatus
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import unpack_logprobs

VERSIONS, MEMBERS, REPLY_TOKENS = 3, 4, 12
ENVIRONMENTS = ("colours", "others")
"""Of the groups; the first one has the algorithm `dr_grpo`, the other that of the run."""
RETRIES = 8  # of calls that the gateway answers with 503, because no engine is ready yet
SMOLLM2 = ROOT / ".cache" / "smollm2" / "model"
LEARNING_RATES = {"smollm2": 1e-6}
"""Of AdamW; 1e-4 for the models of random weights, so that versions differ.

The first step of AdamW changes each weight by the learning rate. At 1e-4, bfloat16 rounds most of
that away in a trained model of large weights: the served version of SmolLM2 then differs from the
trained weights by up to 2.3 nats a token. At 1e-6 the rounding of the weights (0.03) is below that
of the forward pass (0.2).
"""
BOUND = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference between engine and trainer in the log-probability of a token."""


def settings_of(home: Path, model: Path, dtype: str, lr: float) -> Settings:
    return Settings.model_validate({
        **own_installation(home),
        "run_id": "models",
        "admit": {"policy": {"group_size": MEMBERS, "batch_groups": len(ENVIRONMENTS)}},
        "trainer": {
            "model_path": model, "max_versions": VERSIONS, "lr": lr,
            "environments": ENVIRONMENTS[:1],
        },
        "rollout": {
            "port": free_port(), "dtype": dtype, "max_model_len": 512, "kv_cache_mb": 64,
            "max_num_seqs": 8,
        },
        "up": {"processes": ["broker", "gateway", "assemble", "admit", "trainer", "rollout"]},
    })  # fmt: skip


async def play(
    url: str, group: str, environment: str, member: int, http: aiohttp.ClientSession
) -> None:
    """Play two turns; every second member of a group is rewarded."""
    base = f"{url}/{group}-{member}/{group}/v1"
    task = {"metadata": {"environment": environment}}
    async with http.post(f"{base}/register_trajectory", json=task) as reply:
        assert reply.status == 200, await reply.text()
    messages = [{"role": "user", "content": "Name a colour."}]
    async with AsyncOpenAI(base_url=base, api_key="unused", max_retries=RETRIES) as client:
        for question in ("Another one.", None):
            done = await client.chat.completions.create(
                model="policy",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=REPLY_TOKENS,
            )
            messages.append({"role": "assistant", "content": done.choices[0].message.content or ""})
            if question is not None:
                messages.append({"role": "user", "content": question})
    async with http.post(f"{base}/complete_trajectory", json={"reward": member % 2}) as reply:
        assert reply.status == 200, await reply.text()


def batch(url: str, name: str) -> None:
    """Play the groups of one batch."""

    async def body() -> None:
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
            for group, environment in enumerate(ENVIRONMENTS):
                for member in range(MEMBERS):
                    tasks.create_task(play(url, f"{name}-{group}", environment, member, http))

    asyncio.run(body())


def served(feed: Feed) -> int:
    """Return the sync index that the worker serves; -1 before the first version."""
    found = [
        parse_version(status.weight_version)
        for status in feed.events(feed.topics.workers, WorkerStatus)
        if status.state == "ready" and status.weight_version is not None
    ]
    return max((version.sync_index for version in found if version), default=-1)


def run_model(running: Up) -> list[WeightVersion]:
    """Train one batch of each version; return the versions, oldest first."""
    settings = running.settings
    running.until_says("up", '"event": "up"', 900)
    feed = Feed(settings)
    for index in range(VERSIONS + 1):
        running.until(lambda index=index: served(feed) >= index, f"version {index} serves", 900)  # type: ignore[misc]
        if index < VERSIONS:
            batch(f"http://127.0.0.1:{settings.gateway.port}", f"b{index}")
    steps = feed.events(feed.topics.steps, Step)
    closed = feed.events(feed.topics.trajectories, Trajectory)
    assert len(steps) == VERSIONS * len(ENVIRONMENTS) * MEMBERS * 2
    assert all(step.trainable for one in closed for step in one.steps), [
        step.untrainable_reason for one in closed for step in one.steps
    ]
    how = {
        (s.sampling.temperature, s.sampling.top_p, s.sampling.top_k, s.sampling.repetition_penalty)
        for s in steps
        if s.sampling is not None
    }
    assert how == {(1.0, 1.0, 0, 1.0)}, "the model's generation defaults applied"
    versions: list[WeightVersion] = feed.versions()
    trained = feed.events(feed.topics.trained_tokens, TrainedTokens)
    assert {one.step_id for one in trained} == {step.step_id for step in steps}
    for version in versions[1:]:
        found = differences(version, steps, trained)
        mean = sum(found) / len(found)
        print(f"{version.version_id}: {len(found)} tokens, mean |engine - trainer| {mean:.2g}")
        assert mean == pytest.approx(version.metrics["logp_mean_abs_diff_same_version"], rel=1e-3)
        assert max(found) == pytest.approx(version.metrics["logp_max_abs_diff_same_version"])
    feed.close()
    running.stop()
    return versions


def differences(
    version: WeightVersion, steps: list[Step], trained: list[TrainedTokens]
) -> list[float]:
    """Return |engine - trainer| of the tokens of a version that its parent sampled, from records
    made before the first optimizer step."""
    engine = {
        step.step_id: unpack_logprobs(step.response_logprobs or b"")
        for step in steps
        if step.version_first == version.parent_version
    }
    return [
        abs(p - q)
        for one in trained
        if one.version_id == version.version_id and one.updates == 0 and one.step_id in engine
        for p, q in zip(engine[one.step_id], unpack_logprobs(one.logprobs or b""), strict=True)
        if not math.isnan(q)  # it was not trained
    ]


@pytest.mark.long
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("family", ["bfloat16-sharded", "tied-with-head", "qwen3", "smollm2"])
def test_a_model_trains_and_each_of_its_versions_is_served(
    tmp_path: Path, family: str, dtype: str
) -> None:
    model = SMOLLM2 if family == "smollm2" else write_family(family, tmp_path / "model")
    with up(settings_of(tmp_path, model, dtype, LEARNING_RATES.get(family, 1e-4))) as running:
        versions = run_model(running)
    assert [version.sync_index for version in versions] == list(range(VERSIONS + 1))
    for version in versions[1:]:
        found = version.metrics["logp_max_abs_diff_same_version"]
        print(f"{family} {dtype} {version.version_id}: |engine - trainer| <= {found:.2g}")
        assert found < BOUND[dtype]
        assert version.metrics["tokens_outside_vocabulary"] == 0
        assert version.metrics["optimizer_steps"] == 2
        assert version.metrics["environment/colours/reward_mean"] == 0.5
        assert "environment/colours/loss" in version.metrics

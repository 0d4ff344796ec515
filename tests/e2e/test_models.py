"""A model in the shape of a published one trains: `clawstream up` with a model and a client loop.

The run publishes three versions after the initial one, and a real vLLM loads each of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from openai import AsyncOpenAI
from support.feed import Feed
from support.model_families import write_bfloat16_sharded
from support.ports import free_port
from support.up import Up, up

from schemas.ids import parse_version
from schemas.records import Step, Trajectory, WeightVersion, WorkerStatus
from schemas.settings import Settings

VERSIONS, GROUPS, MEMBERS, REPLY_TOKENS = 3, 2, 4, 12
RETRIES = 8  # of calls that the gateway answers with 503, because no engine is ready yet
BOUND_NATS = 0.5
"""Largest difference between engine and trainer in the log-probability of a token."""

pytestmark = pytest.mark.timeout(1800)


def settings_of(home: Path, model: Path) -> Settings:
    return Settings.model_validate({
        "data_dir": home / "run",
        "run_id": "models",
        "kafka": {"partitions": 2, "topic_prefix": f"t{uuid4().hex[:8]}"},
        "broker": {"port": free_port()},
        "gateway": {"port": free_port()},
        "admit": {"policy": {
            "group_size": MEMBERS, "batch_groups": GROUPS, "required_rewards": ["env"],
        }},
        "trainer": {"model_path": model, "max_versions": VERSIONS, "lr": 1e-4},
        "rollout": {
            "port": free_port(), "max_model_len": 512, "kv_cache_mb": 64,
            "max_num_seqs": 8,
        },
        "up": {"processes": ["broker", "gateway", "assemble", "admit", "trainer", "rollout"]},
    })  # fmt: skip


async def play(url: str, group: str, member: int, http: aiohttp.ClientSession) -> None:
    """Play two turns; every second member of a group is rewarded."""
    base = f"{url}/{group}-{member}/{group}/v1"
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
            for group in range(GROUPS):
                for member in range(MEMBERS):
                    tasks.create_task(play(url, f"{name}-{group}", member, http))

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
    assert len(steps) == VERSIONS * GROUPS * MEMBERS * 2
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
    feed.close()
    running.stop()
    return versions


@pytest.mark.long
def test_a_sharded_bfloat16_model_trains_and_each_of_its_versions_is_served(
    tmp_path: Path,
) -> None:
    model = write_bfloat16_sharded(tmp_path / "model")
    with up(settings_of(tmp_path, model)) as running:
        versions = run_model(running)
    assert [version.sync_index for version in versions] == list(range(VERSIONS + 1))
    for version in versions[1:]:
        mean = version.metrics["logp_mean_abs_diff_same_version"]
        largest = version.metrics["logp_max_abs_diff_same_version"]
        print(f"{version.version_id}: {mean=:.2g} {largest=:.2g} nats")
        assert largest < BOUND_NATS
        assert version.metrics["tokens_outside_vocabulary"] == 0
        assert version.metrics["optimizer_steps"] == 2

"""Online training: conversations of users, each reply judged by the user's next message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from support.arithmetic_model import make_arithmetic_model
from support.feed import Feed
from support.ports import free_port
from support.up import ENVIRON, ROOT, Up, up

from clawstream.runtime.process.config import load
from clawstream.schemas.records import ReadyBatch, Step
from clawstream.schemas.settings import Settings

EXAMPLES = ROOT / "examples"
VERSIONS = 2
VERDICTS = {"Thank you!": 1.0, "That is not right.": 0.0}
"""The user's next message, and the reward of the reply before it."""

pytestmark = pytest.mark.long


def settings_of(home: Path, model: Path) -> Settings:
    """Return the settings of the example, with conversations that end soon and small batches."""
    values = {
        "data_dir": home / "run",
        "run_id": "online",
        "kafka.topic_prefix": f"t{uuid4().hex[:8]}",
        "kafka.partitions": 2,
        "broker.port": free_port(),
        "gateway.port": free_port(),
        "jobs.anonymous_inactivity_s": 3,
        "jobs.reward_functions": f'{{"*": ["{EXAMPLES}/next_turn.py:helped@1"]}}',
        "admit.policy.batch_groups": len(VERDICTS),
        "trainer.model_path": model,
        "trainer.max_versions": VERSIONS,
        "rollout.port": free_port(),
        "rollout.max_model_len": 1024,
        "rollout.kv_cache_mb": 64,
        "up.processes": "[broker,gateway,assemble,reward,admit,trainer,rollout]",
    }
    override = ["--override-generation-config", '{"max_new_tokens": 24}']
    overrides = [f"{name}={value}" for name, value in values.items()]
    settings = load(EXAMPLES / "online.yaml", overrides, environ={})
    rollout = settings.rollout.model_copy(update={"extra_args": tuple(override)})
    return settings.model_copy(update={"rollout": rollout})


def talk(running: Up, opening: str, verdict: str) -> None:
    """Play one user of the example to the end of standard input."""
    gateway = f"http://127.0.0.1:{running.settings.gateway.port}"
    subprocess.run(
        [sys.executable, EXAMPLES / "online.py"],
        env={**ENVIRON, "GATEWAY": gateway},
        input=f"{opening}\n{verdict}\n",
        text=True,
        check=True,
        timeout=60,
    )


def test_conversations_are_trained_by_the_rewards_of_their_next_turns(tmp_path: Path) -> None:
    model = make_arithmetic_model(tmp_path / "model", positions=1024)
    settings = settings_of(tmp_path, model)
    with up(settings) as running:
        running.until_says("up", '"event": "up"', 600)
        feed = Feed(settings)
        for version in range(1, VERSIONS + 1):
            for verdict in VERDICTS:
                talk(running, f"Question {version}, is it open? {verdict[0]}", verdict)
            running.until_says("rollout", f"online/{version}.0", 120)
        batches: list[ReadyBatch] = feed.batches()
        steps = {s.step_id: s for s in feed.events(feed.topics.steps, Step)}
        feed.close()
        running.stop()
    assert len(batches) >= VERSIONS
    for index, batch in enumerate(batches[:VERSIONS]):
        rewards = [r for g in batch.groups for m in g.members for r in m.rewards]
        assert {f"{r.source}/{r.name}" for r in rewards} == {"rule/helped"}
        assert {r.value for r in rewards} == set(VERDICTS.values())
        assert {steps[str(r.step_id)].version_first for r in rewards} == {f"online/{index}.0"}

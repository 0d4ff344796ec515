"""Every example on a real vLLM with a toy model: each rollout is recorded with a reward.

The model half knows the arithmetic task and says nonsense to everything else, so the rewards are of
no interest. One `clawstream up` serves all examples; each plays a run of its own, so that each has
its own reward functions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import agents
from support.arithmetic_model import make_arithmetic_model
from support.feed import Feed
from support.patience import Patience
from support.ports import free_port
from support.up import ENVIRON, ROOT, Up, own_installation, up

from clawstream.agent_flow.environments.verifiers.client import DEFAULT_PYTHON, PYTHON
from clawstream.runtime.process.config import load
from clawstream.schemas.records import Reward, Trajectory
from clawstream.schemas.settings import Settings

EXAMPLES = ROOT / "examples"
LONGEST_S = 90.0
"""Longest time of an example, from its start until its rewards are on the log."""
POSITIONS = 32_768
"""Claude Code's first prompt has thousands of words, each letter of which is a token here."""
REPLY_TOKENS = 128
VERDICT = ('{"explanation": "', '", "score": ', "}")
"""Tokens of which the toy model, as a judge, makes a JSON object of the requested schema."""
USER = "Is it open?\n+\nThank you! And on Sunday?\n-\nThat is not right.\nBye\n"

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Played:
    """What an example left on the log.

    trajectories: The completed ones, by trajectory key; a failed rollout was replaced by another.
    rewards: Those of each trajectory, by trajectory key.
    """

    trajectories: Mapping[str, Trajectory]
    rewards: Mapping[str, Sequence[Reward]]

    @property
    def names(self) -> set[str]:
        return {f"{r.source}/{r.name}" for found in self.rewards.values() for r in found}


@dataclass
class Stage:
    """A running installation, and how long each example took on it."""

    running: Up
    feed: Feed
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.running.settings.gateway.port}"

    def play(
        self,
        name: str,
        words: Sequence[str | Path],
        rollouts: int,
        folder: Path,
        *,
        stdin: str = "",
        environment: Mapping[str, str] = ENVIRON,
    ) -> Played:
        """Run a command until each of its rollouts has a reward on the log.

        Args:
            name: The run of its trajectories.
            words: Command line.
            rollouts: Trajectories that it makes.
            folder: Working directory.
            stdin: Input of the command.
            environment: Variables of the command.
        """
        patience = Patience(LONGEST_S)
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        done = subprocess.run(
            list(map(str, words)),
            cwd=folder,
            env={**environment, "PATH": path, "PYTHONPATH": str(ROOT), "GATEWAY": self.gateway},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, said
        print(said)
        self.running.until(
            lambda: self._is_recorded(name, rollouts),
            f"{rollouts} rewarded rollouts",
            patience.left_s,
        )
        self.seconds[name] = round(LONGEST_S - patience.left_s, 1)
        return self._played(name)

    def flow(
        self, name: str, words: Sequence[str | Path], rollouts: int, folder: Path, *command: str
    ) -> Played:
        """Play a flow, or a command line, of an example as a run of the example's name."""
        kind = "exec" if command else "run"
        given = [sys.executable, "-m", "clawstream", "flow", kind, *words, "--eval", f"run={name}"]
        given += [f"data_dir={self.running.home}", *(["--", *command] if command else [])]
        environment = {**ENVIRON, PYTHON: os.environ.get(PYTHON) or str(ROOT / DEFAULT_PYTHON)}
        return self.play(name, given, rollouts, folder, environment=environment)

    def _is_recorded(self, name: str, rollouts: int) -> bool:
        played = self._played(name)
        return len(played.trajectories) >= rollouts and all(
            map(played.rewards.get, played.trajectories)
        )

    def _played(self, name: str) -> Played:
        topics = self.feed.topics
        rewards = defaultdict[str, list[Reward]](list)
        for reward in self.feed.events(topics.rewards, Reward):
            if reward.run_id == name and reward.value is not None:
                rewards[reward.trajectory_key].append(reward)
        closed = self.feed.events(topics.trajectories, Trajectory)
        ended = [t for t in closed if t.run_id == name and t.outcome == "completed" and t.steps]
        return Played({t.trajectory_key: t for t in ended}, rewards)


def settings_of(home: Path, model: Path) -> Settings:
    engine = free_port()
    judge = load(
        EXAMPLES / "judge.yaml",
        [
            f"jobs.reward_models.clear.url=http://127.0.0.1:{engine}/v1",
            "jobs.reward_models.clear.model=policy",
            "jobs.reward_models.clear.temperature=1.0",
        ],
        environ={},
    )
    online = load(EXAMPLES / "online.yaml", environ={})
    right = f"{EXAMPLES}/reward_functions.py:right@1"
    return Settings.model_validate({
        **own_installation(home),
        "run_id": "online",
        "jobs": {
            "anonymous_inactivity_s": 3.0,
            "new_messages_bytes": online.jobs.new_messages_bytes,
            "reward_models": judge.model_dump()["jobs"]["reward_models"],
            "reward_functions": {
                "custom-reward": [right],
                "judge": ["clear@1"],
                "online": [f"{EXAMPLES}/next_turn.py:helped@1"],
            },
        },
        "rollout": {
            "model_path": model, "serve_base": True, "port": engine, "max_model_len": POSITIONS,
            "kv_cache_mb": 512, "max_num_seqs": 16,
            "tool_parser": "strict_tags", "tool_parser_plugin": ROOT / "demo" / "tool_parser.py",
            "extra_args": ["--override-generation-config", f'{{"max_new_tokens": {REPLY_TOKENS}}}'],
        },
        "up": {"processes": ["broker", "gateway", "assemble", "reward", "rollout"]},
    })  # fmt: skip


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    model = tmp_path_factory.mktemp("model") / "m"
    make_arithmetic_model(model, more_phrases=VERDICT, positions=POSITIONS)
    with up(settings_of(tmp_path_factory.mktemp("examples"), model)) as running:
        running.until_says("up", '"event": "up"', 600)
        feed = Feed(running.settings)
        made = Stage(running, feed)
        yield made
        feed.close()
        running.stop()
    print(json.dumps({"example_seconds_on_toy_model": made.seconds}))


def test_white_box_agent_with_a_calculator(stage: Stage, tmp_path: Path) -> None:
    words = [f"{EXAMPLES}/arithmetic.py:arithmetic", "limit=4", "n=2"]
    played = stage.flow("arithmetic-white-box", words, 8, tmp_path)
    assert played.names == {"env/complete_trajectory"}


def test_black_box_agent_with_a_calculator(stage: Stage, tmp_path: Path) -> None:
    words = [f"tasks={EXAMPLES}/arithmetic.jsonl", f"reward={EXAMPLES}/grade.py:grade"]
    agent = (sys.executable, f"{EXAMPLES}/arithmetic_agent.py", "{question}")
    played = stage.flow("arithmetic-black-box", words, 6, tmp_path, *agent)
    assert played.names == {"env/complete_trajectory"}


def test_custom_reward_file(stage: Stage, tmp_path: Path) -> None:
    agent = (sys.executable, f"{EXAMPLES}/arithmetic_agent.py", "{question}")
    words = [f"tasks={EXAMPLES}/arithmetic.jsonl"]
    assert stage.flow("custom-reward", words, 6, tmp_path, *agent).names == {"rule/right"}


def test_judge(stage: Stage, tmp_path: Path) -> None:
    words = [f"{EXAMPLES}/judge.py:explain", "limit=4", "n=2"]
    assert stage.flow("judge", words, 8, tmp_path).names == {"judge/clear"}


def test_reasoning_gym_task(stage: Stage, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    words = [f"env={EXAMPLES}/brief_reasoning.py:leg_counting", "size=4", "n=2"]
    words.append('env_config={"max_animals": 3}')
    played = stage.flow("reasoning-gym", words, 8, tmp_path)
    assert played.names == {"env/right", "env/brief"}


def test_verifiers_taskset(stage: Stage, tmp_path: Path) -> None:
    if not Path(os.environ.get(PYTHON) or ROOT / DEFAULT_PYTHON).exists():
        pytest.skip("needs verifiers: make environments")
    words = [f"env=verifiers:{EXAMPLES}/verifiers_calculator.py", "size=2", "concurrency=2"]
    played = stage.flow("verifiers", words, 2, tmp_path)
    assert played.names == {"env/right", "env/used_the_tool"}


def test_unmodified_command_line_agent(stage: Stage, tmp_path: Path) -> None:
    agents.install()
    (tmp_path / "home").mkdir()
    words = ["sh", EXAMPLES / "claude_code.sh", "--eval", "limit=2", "run=claude-code"]
    words.append(f"data_dir={stage.running.home}")
    home = agents.environment(tmp_path / "home")
    played = stage.play("claude-code", words, 2, tmp_path, environment=home)
    assert played.names == {"env/complete_trajectory"}


def test_online(stage: Stage, tmp_path: Path) -> None:
    """Rewarded by the user's thumbs and by the next turn; the conversation ends by inactivity."""
    words = [sys.executable, EXAMPLES / "online.py"]
    played = stage.play("online", words, 1, tmp_path, stdin=USER)
    assert played.names == {"human/thumb", "rule/helped"}

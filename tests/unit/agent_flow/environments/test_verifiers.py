"""verifiers in its own process, with real rollouts. Run by `make test-environments`."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.agent_flow import FlowError
from clawstream.agent_flow.environments.environment import load_environment
from clawstream.agent_flow.environments.verifiers.client import DEFAULT_PYTHON, PYTHON
from clawstream.agent_flow.gateway.client import Gateway
from clawstream.agent_flow.options import Mode, options_of, parse_words, split_of
from clawstream.agent_flow.play.progress import Progress
from clawstream.agent_flow.play.runner import Runner
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Reward, SessionEvent, Step

CODEC = Codec()
ROOT = Path(__file__).parents[4]
HERE = Path(os.environ.get(PYTHON) or ROOT / DEFAULT_PYTHON)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not HERE.exists(), reason="needs verifiers: make environments"),
]
HARD = """
import time
from typing import Literal
import verifiers.v1 as vf

class Data(vf.TaskData):
    kind: str

class Config(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"

class HardTask(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def exact(self, trace: vf.Trace) -> float:
        if self.data.kind == "raises":
            raise ValueError("no gold answer")
        if self.data.kind == "blocks":
            time.sleep(3600)
        return 1.0

class Hard(vf.Taskset[HardTask, Config]):
    def load(self):
        assert self.config.split == "test"
        for kind in ("raises", "blocks", "fine"):
            yield HardTask(Data(prompt="Say 0.", kind=kind, name=kind), self.config.task)

__all__ = ["Hard"]
"""


@pytest.fixture(autouse=True)
def _python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, str(HERE))


def multiplies(request: Any) -> Script:
    """Call the tool with the numbers of the question, then say its result."""
    question, last = request["messages"][0]["content"], request["messages"][-1]
    if last["role"] == "tool":
        return Script([ScriptedChoice([7], [str(last["content"])], [-0.5])])
    a, b = re.findall(r"\d+", question)[:2]
    function = {"name": "calculator_multiply", "arguments": f'{{"a": {a}, "b": {b}}}'}
    call = {"id": "call_0", "type": "function", "function": function}
    return Script([ScriptedChoice([8], [None], [-0.5], [call], "tool_calls")])


def play(tmp_path: Path, words: list[str], script: Any) -> tuple[Progress, list[Any]]:
    given, progress, records = parse_words(words, {}), Progress(), []
    played = load_environment(str(given.env), split_of(given, Mode(evaluate=True)))

    async def scenario(fixture: GatewayFixture) -> None:
        options = options_of(given, played.limits, Mode(evaluate=True))
        async with Gateway(fixture.url, None, patience_s=5) as gateway:
            await Runner(played, gateway, options, progress).play(played.source)
        records.extend(fixture.records())

    run_gateway(tmp_path, CODEC, scenario, script)
    return progress, records


def test_rubric_and_tool_server_of_the_example(tmp_path: Path) -> None:
    example = ROOT / "examples" / "verifiers_calculator.py"
    progress, records = play(tmp_path, [f"env=verifiers:{example}", "size=2", "n=2"], multiplies)
    assert progress.summary()["rollouts"] == {"completed": 4}, progress.reasons
    rewards = Counter((r.name, r.value) for r in records if isinstance(r, Reward))
    assert rewards == {("right", 1.0): 4, ("used_the_tool", 0.1): 4}
    assert len([r for r in records if isinstance(r, Step)]) == 8


def test_error_is_a_failed_rollout_and_a_blocked_process_is_replaced(tmp_path: Path) -> None:
    """Also: a split with another name than the channel, and weights."""
    (tmp_path / "hard_tasks.py").write_text(HARD)
    words = [f"env=verifiers:{tmp_path / 'hard_tasks.py'}", "concurrency=1", "attempts=1"]
    script = Script([ScriptedChoice([7], ["0"], [-0.5])])
    progress, records = play(tmp_path / "data", [*words, "timeout_s=60"], script)
    ends = [r.kind for r in records if isinstance(r, SessionEvent) and r.kind != "opened"]
    assert ends == ["failed", "abandoned", "completed"], progress.reasons
    assert any("no gold answer" in reason for reason in progress.reasons)
    assert [(r.name, r.value) for r in records if isinstance(r, Reward)] == [("exact", 0.5)]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("", "tasks without end"),
        ("if __name__.*", "must end in"),
        ("^__all__.*$", "defines no `__all__`"),
    ],
)
def test_environment_that_cannot_be_played_is_refused(
    tmp_path: Path, change: str, error: str
) -> None:
    text = (ROOT / "examples" / "verifiers_calculator.py").read_text()
    file = tmp_path / "changed.py"
    file.write_text(re.sub(change, "", text, flags=re.DOTALL if "if" in change else re.M))
    size = [] if not change else ["size=1"]
    with pytest.raises(FlowError, match=error):
        play(tmp_path / "data", [f"env=verifiers:{file}", *size], multiplies)

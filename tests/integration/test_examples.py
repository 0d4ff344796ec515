"""Every example, run as its first lines say, against a real gateway with a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import agents
from support.assemble import InMemoryPartition
from support.gateway import GatewayFixture, run_gateway
from support.model_endpoint import Reply as Answer
from support.model_endpoint import chat, model_endpoint
from support.toy_model import Call, Heard, Reply, ToyModel
from support.trajectories import answered

from clawstream.agent_flow.environments.verifiers.client import DEFAULT_PYTHON, PYTHON
from clawstream.agent_flow.play.command import CommandResult
from clawstream.agent_flow.rewards import last_number
from clawstream.rewards.registry import Rule
from clawstream.rewards.results import rewards_of
from clawstream.runtime.process.config import load
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Reward, SessionEvent, Step, Tick
from clawstream.schemas.user_function import load_function
from clawstream.stream_jobs.assemble.limits import limits_of
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS
from clawstream.stream_jobs.reward.evaluate import RuleEvaluator
from clawstream.stream_jobs.reward.settings_check import check_reward_functions

CODEC = Codec()
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TASKS = [json.loads(line) for line in (EXAMPLES / "arithmetic.jsonl").read_text().splitlines()]
LONGEST = 60
"""Lines of an example."""


def ran(
    tmp_path: Path,
    words: Sequence[str | Path],
    decide: Callable[[Heard], Reply],
    stdin: str = "",
    **more: str,
) -> tuple[list[Any], str]:
    """Run a command beside a gateway; return the records on the log and what it printed."""
    records: list[Any] = []
    printed: list[str] = []

    async def scenario(fixture: GatewayFixture) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GATEWAY": fixture.url,
            **more,
        }
        process = await asyncio.create_subprocess_exec(
            *(str(word).replace("GATEWAY", fixture.url) for word in words),
            cwd=tmp_path,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate(stdin.encode())
        assert process.returncode == 0, f"{out.decode()[-3000:]}\n{err.decode()[-3000:]}"
        printed.append(out.decode())
        records.extend(fixture.records())

    run_gateway(tmp_path / "data", CODEC, scenario, ToyModel(decide))
    return records, printed[0]


def flow(*words: str | Path, command: Sequence[str | Path] = ()) -> list[str | Path]:
    kind = "exec" if command else "run"
    given = [
        sys.executable,
        "-m",
        "clawstream.agent_flow",
        kind,
        *words,
        "--eval",
        "gateway=GATEWAY",
    ]
    return [*given, "--", *command] if command else given


def rewards(records: list[Any]) -> Counter[tuple[str, float]]:
    return Counter((r.name, r.value) for r in records if isinstance(r, Reward))


def calculates(heard: Heard) -> Reply:
    """Call the calculator for `a * b - c` of the question, then say its result."""
    if heard.last.role == "tool":
        return Reply(f"It is {heard.results[-1]}.")
    a, b, c = (int(number) for number in re.findall(r"\d+", heard.users[0]))
    return Reply("", (Call("calculate", {"expression": f"{a} * {b} - {c}"}),))


def knows(heard: Heard) -> Reply:
    """Know the answers of all tasks but the first."""
    for task in TASKS[1:]:
        if task["question"] in heard.users[-1]:
            return Reply(f"That makes {task['answer']}")
    return Reply("That makes 0")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


@pytest.mark.long
def test_white_box_agent_with_a_calculator(tmp_path: Path) -> None:
    records, _ = ran(
        tmp_path, flow(EXAMPLES / "arithmetic.py:arithmetic", "limit=3", "n=2"), calculates
    )
    assert rewards(records) == {("complete_trajectory", 1.0): 6}
    assert len([r for r in records if isinstance(r, Step)]) == 12


@pytest.mark.long
def test_black_box_agent_with_a_calculator(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TASKS[0]))
    agent = [sys.executable, EXAMPLES / "arithmetic_agent.py", "{question}"]
    grade = f"reward={EXAMPLES / 'grade.py'}:grade"
    records, _ = ran(tmp_path, flow(f"tasks={tasks}", "n=2", grade, command=agent), calculates)
    assert rewards(records) == {("complete_trajectory", 1.0): 2}
    assert len([r for r in records if isinstance(r, Step)]) == 4


@pytest.mark.long
def test_custom_reward_file(tmp_path: Path) -> None:
    """The flow gives no reward; the file rates the trajectories that assemble makes of its log."""
    say = "import os, openai; openai.OpenAI().chat.completions.create(model='policy', messages=[{"
    say += "'role': 'user', 'content': '{question}'}])"
    words = flow(f"tasks={EXAMPLES / 'arithmetic.jsonl'}", command=[sys.executable, "-c", say])
    records, _ = ran(tmp_path, words, knows)
    partition = InMemoryPartition().feed(
        *((STEPS, number, record) for number, record in enumerate(records))
    )
    right = load_function("reward_functions.py:right", [EXAMPLES])
    values = Counter(right(trajectory) for trajectory in partition.trajectories.values())
    assert not rewards(records) and values == {0.0: 1, 1.0: len(TASKS) - 1}


@pytest.mark.long
def test_judge(tmp_path: Path) -> None:
    """The flow gives no reward; the judge of the settings rates the trajectories by its rubric."""
    words = flow(EXAMPLES / "judge.py:explain", "limit=2", "n=2")
    records, _ = ran(tmp_path, words, lambda heard: Reply("It pulls iron."))
    partition = InMemoryPartition().feed(
        *((STEPS, number, record) for number, record in enumerate(records))
    )

    def verdict(body: Any) -> Answer:
        material = body["messages"][-1]["content"]
        is_clear = "child of five" in material and '"It pulls iron."' in material
        return chat(json.dumps({"explanation": "It is short.", "score": 9 if is_clear else 2}))

    with model_endpoint(verdict) as endpoint:
        words = [f"jobs.reward_models.clear.url={endpoint.url}", f"data_dir={tmp_path / 'judge'}"]
        settings = load(EXAMPLES / "judge.yaml", words, environ={})
        with closing(RuleEvaluator(settings)) as rules:
            given = [r for t in partition.trajectories.values() for r in rules.evaluate(t, 0)]
    found = Counter((r.source, r.name, r.value, r.reason) for r in given if isinstance(r, Reward))
    assert found == {("judge", "clear", 0.9, None): 2, ("judge", "clear", 0.2, None): 2}
    assert len(endpoint.requests) == 2, "equal replies to a question are judged once"
    assert settings.required_rewards == ("judge/clear",)
    assert not rewards(records)


@pytest.mark.long
def test_reasoning_gym_task(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    example = EXAMPLES / "brief_reasoning.py"
    words = flow(f"env={example}:chain_sum", "size=2", "n=2", 'env_config={"max_terms": 2}')

    def solves(heard: Heard) -> Reply:
        (expression,) = re.findall(r"[\d+ -]+(?= =)", heard.users[0])
        return Reply(f"<answer>{eval(expression)}</answer>")

    records, _ = ran(tmp_path, words, solves)
    assert rewards(records) == {("right", 1.0): 4, ("brief", 0.1): 4}


@pytest.mark.long
def test_verifiers_taskset(tmp_path: Path) -> None:
    python = Path(os.environ.get(PYTHON) or ROOT / DEFAULT_PYTHON)
    if not python.exists():
        pytest.skip("needs verifiers: make environments")

    def multiplies(heard: Heard) -> Reply:
        if heard.last.role == "tool":
            return Reply(heard.results[-1])
        a, b = (int(number) for number in re.findall(r"\d+", heard.users[0]))
        return Reply("", (Call("calculator_multiply", {"a": a, "b": b}),))

    example = EXAMPLES / "verifiers_calculator.py"
    words = flow(f"env=verifiers:{example}", "size=1", "n=2")
    records, _ = ran(tmp_path, words, multiplies, **{PYTHON: str(python)})
    assert rewards(records) == {("right", 1.0): 2, ("used_the_tool", 0.1): 2}


@pytest.mark.long
def test_unmodified_command_line_agent(tmp_path: Path) -> None:
    agents.install()
    (tmp_path / "home").mkdir()
    environment: Mapping[str, str] = agents.environment(tmp_path / "home")
    environment = {
        **environment,
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
    }
    words = ["sh", EXAMPLES / "claude_code.sh", "--eval", "limit=2", "gateway=GATEWAY"]
    records, _ = ran(tmp_path, words, knows, **environment)
    assert rewards(records) == {("complete_trajectory", 0.0): 1, ("complete_trajectory", 1.0): 1}


@pytest.mark.long
def test_online(tmp_path: Path) -> None:
    said = "Hello\n+\nAnd now?\n-\n"
    words = [sys.executable, EXAMPLES / "online.py"]
    records, out = ran(
        tmp_path, words, lambda heard: Reply(f"Reply {len(heard.users)}"), stdin=said
    )
    assert out.splitlines() == ["Reply 1", "Reply 2"]
    steps = [r for r in records if isinstance(r, Step)]
    given = [(r.step_id, r.name, r.value) for r in records if isinstance(r, Reward)]
    assert given == [(steps[0].step_id, "thumb", 1.0), (steps[1].step_id, "thumb", 0.0)]
    assert len({step.trajectory_key for step in steps}) == 1
    assert not [r for r in records if isinstance(r, SessionEvent)]


LISTED = f"{', '.join(str(number) for number in range(500))} or 501"


@pytest.mark.parametrize(("said", "value"), [("It is 69.", 1.0), ("69.0", 1.0), (LISTED, 0.0)])
def test_no_example_rewards_an_answer_among_others(said: str, value: float) -> None:
    task = TASKS[0]
    grade = load_function("grade.py:grade", [EXAMPLES])
    right = load_function("reward_functions.py:right", [EXAMPLES])
    result = CommandResult(0, f"thinking: 69\n{said}\n", "", Path())
    assert grade(task, result) == last_number(said, task["answer"]) == value
    assert right(answered(said, answer=task["answer"])) == value


def test_the_judge_and_its_task_are_short_together() -> None:
    files = [EXAMPLES / "judge.py", EXAMPLES / "judge.yaml"]
    assert sum(len(path.read_text().splitlines()) for path in files) <= LONGEST


def test_settings_of_online_can_work() -> None:
    settings = load(EXAMPLES / "online.yaml", environ={})
    check_reward_functions(settings)
    assert settings.required_rewards == ("rule/helped",)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("Thank you! And on Sunday?", 1.0),
        ("That is not right.", 0.0),
        ("No thanks.", None),
        ("That isn't great", None),
        ("When do you open?", None),
    ],
)
def test_the_next_turn_is_rated_only_without_a_doubt(said: str, value: float | None) -> None:
    rating = load_function("next_turn.py:rating", [EXAMPLES])
    assert rating(["a plain string", {"role": "user", "content": said}]) == value


@pytest.mark.long
def test_online_is_rewarded_by_the_next_turn(tmp_path: Path) -> None:
    """The conversations that assemble makes of the log, closed by inactivity."""
    settings = load(EXAMPLES / "online.yaml", environ={})
    said = "Is it open?\nThank you! And on Sunday?\nThat is not right.\nBye\n"
    words = [sys.executable, EXAMPLES / "online.py"]
    records, _ = ran(tmp_path, words, lambda heard: Reply(f"Reply {len(heard.users)}"), stdin=said)
    limits = replace(limits_of(settings), silent_after=None)
    partition = InMemoryPartition(limits).feed(
        *((STEPS, number, record) for number, record in enumerate(records)),
        (STEPS, 3_600_000, Tick(partition=0)),
    )
    ((key, trajectory),) = partition.trajectories.items()
    helped = load_function("next_turn.py:helped", [EXAMPLES])
    given = list(rewards_of(trajectory, Rule("helped", "1", helped), created_at=0))
    partition.feed(*((REWARDS, 3_600_001, reward) for reward in given))
    found = {r.step_id: r.value for r in partition.last(key).rewards}
    steps = [r.step_id for r in records if isinstance(r, Step)]
    assert partition.last(key).outcome == "completed"
    assert found == {steps[0]: 1.0, steps[1]: 0.0}

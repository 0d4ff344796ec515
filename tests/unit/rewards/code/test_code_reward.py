"""The reward of an answer's code: the tests decide, and a program cannot decide for them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import pids_with, until
from support.trajectories import answered

from rewards.code.reward import CodeReward, code_in, code_tests
from rewards.code.sandbox import SandboxError
from rewards.results import rewards_of, rules_of
from runtime.functions.pool import FunctionPool, PoolStopped
from schemas.settings import FunctionSettings, JobsSettings, Settings

ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\n"
WRONG = ADD.replace("+", "-")
SLOW = {"type": "code", "timeout_s": 1000}
WAITS = "import time; time.sleep(3600)"
CHECKS = ["assert add(1, 2) == 3", "assert add(2, 0) == 2"]
DOUBLE = "```\nprint(2 * int(input()))\n```"
PAIRS = [{"input": "4\n", "output": "8"}, {"input": "1", "output": "2 \n\n"}]


def made(**settings: Any) -> CodeReward:
    try:
        return code_tests({"type": "code", "memory_mb": 128, **settings})
    except SandboxError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return made(timeout_s=60)


@pytest.mark.parametrize(
    ("answer", "tests", "value", "outcome"),
    [
        (ADD, CHECKS, 1.0, "passed"),
        (ADD, CHECKS[0], 1.0, "passed"),
        (WRONG, CHECKS, 0.0, "failed"),
        (DOUBLE, PAIRS, 1.0, "passed"),
        ("print(8)", PAIRS, 0.0, "failed"),
        ("I cannot do this.", CHECKS, 0.0, "failed"),
        (
            ADD.replace("def", "import atexit; atexit.register(print, 1)\ndef"),
            CHECKS,
            1.0,
            "passed",
        ),
        (WRONG, orjson.dumps(CHECKS).decode(), 0.0, "failed"),
        (DOUBLE, orjson.dumps(PAIRS).decode(), 1.0, "passed"),
        ("print(8)", [orjson.dumps(pair).decode() for pair in PAIRS], 0.0, "failed"),
        ("```python\nimport os; os._exit(0)\n```", CHECKS, 0.0, "failed"),
        ("```python\nimport sys; sys.exit()\n```", CHECKS, 0.0, "failed"),
        ("```python\nimport os; os.kill(os.getpid(), 9)\n```", CHECKS, 0.0, "killed"),
        ("print(8); exit(128)", PAIRS[:1], 0.0, "failed"),
    ],
)
def test_the_tests_decide(
    reward: CodeReward, answer: str, tests: Any, value: float, outcome: str
) -> None:
    said = reward(answered(answer, tests=tests))
    assert (said[0], said[1]["outcome"]) == (value, outcome)


def test_a_program_that_does_not_end_has_reward_zero() -> None:
    said = made(timeout_s=1)(answered("while True: pass", tests=CHECKS))
    assert said == (0.0, {"outcome": "timeout", "passed": 0, "tests": 2})


def test_the_share_of_passed_tests() -> None:
    said = made(partial=True, timeout_s=60)(answered(WRONG, tests=CHECKS))
    assert said == (0.5, {"outcome": "failed", "passed": 1, "tests": 2})


@pytest.mark.parametrize("tests", [None, [], [3], [{"input": "1"}], "[]", '{"input": 1}'])
def test_without_tests_there_is_no_reward(reward: CodeReward, tests: Any) -> None:
    with pytest.raises(ValueError, match="test"):
        reward(answered(ADD, tests=tests))


def test_a_configured_reward_runs_in_a_child_process(reward: CodeReward) -> None:
    jobs = JobsSettings.model_validate(
        {"reward_functions": {"*": ["tests@3"]}, "reward_models": {"tests": {"type": "code"}}}
    )
    assert jobs.reward_name("tests@3") == "rule/tests"
    with FunctionPool(FunctionSettings()) as pool:
        (rule,) = rules_of(Settings(jobs=jobs), pool.find)["*"]
        (given,) = rewards_of(answered(ADD, tests=CHECKS), rule, 0)
        (bare,) = rewards_of(answered(ADD), rule, 0)
    assert (given.source, given.name, given.value, given.reward_revision) == ("rule", "tests", 1, 3)
    assert orjson.loads(given.detail_json or b"") == {"outcome": "passed", "passed": 2, "tests": 2}
    assert (bare.value, bare.reason) == (None, "ValueError: metadata has no tests")


@pytest.mark.slow
def test_to_stop_ends_a_program_that_runs(reward: CodeReward) -> None:
    word = f"outlives-{os.getpid()}"
    program = f"import os, sys; os.execv(sys.executable, ['python3', '-c', {WAITS!r}, '{word}'])"
    jobs = JobsSettings.model_validate(
        {"reward_functions": {"*": ["tests@1"]}, "reward_models": {"tests": SLOW}}
    )
    settings = Settings(jobs=jobs, functions=FunctionSettings(timeout_s=3600))
    pool, threads = FunctionPool(settings.functions), ThreadPoolExecutor(1)
    (rule,) = rules_of(settings, pool.find)["*"]
    call = threads.submit(rule.function, answered(program, tests=CHECKS))
    until(lambda: bool(pids_with(word)))
    pool.stop()
    assert isinstance(call.exception(), PoolStopped)
    until(lambda: not pids_with(word))
    threads.shutdown()


LABELS = ["py", "python3 ", "Python", "", "bash", "cpp", "text"]


@given(
    st.lists(st.tuples(st.sampled_from(LABELS), st.text(alphabet="ab c\n", max_size=20))),
    st.sampled_from(["\n", "\r\n"]),
)
def test_the_last_block_of_python_is_the_code(blocks: list[tuple[str, str]], end: str) -> None:
    answer = "".join(f"text:{end}```{label}{end}{code}\n```{end}" for label, code in blocks)
    python = [code for label, code in blocks if label.strip().lower().startswith("py")]
    bare = [code for label, code in blocks if not label]
    expected = next(reversed(python or bare), None)
    assert code_in(answer) == (answer if expected is None else f"{expected}\n")


@pytest.mark.parametrize("gap", ["", "\n"])
def test_a_block_in_tags_is_the_code(gap: str) -> None:
    assert code_in(f"So:\n<answer>{gap}```python\nprint(1)\n```{gap}</answer>") == "print(1)\n"


def test_a_fence_inside_a_line_is_no_block() -> None:
    assert code_in("```py\nx = '```'\n```\nIt prints ```1```.") == "x = '```'\n"

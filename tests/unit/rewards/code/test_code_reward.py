"""The reward of an answer's code: the tests decide, and a program cannot decide for them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from textwrap import indent
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import pids_with, until
from support.trajectories import answered

from clawstream.rewards.code.reward import CodeReward, code_in, code_tests
from clawstream.rewards.code.sandbox import SandboxError
from clawstream.rewards.results import rewards_of, rules_of
from clawstream.runtime.functions.pool import FunctionPool, PoolStopped
from clawstream.schemas.settings import FunctionSettings, JobsSettings, Settings

ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\n"
DEF = "def add(a, b):\n    return a + b\n"
NODE = """\
from dataclasses import dataclass, field
@dataclass(order=True)
class Node:
    val: int
    next: 'Node | None' = None
    more: 'list[int]' = field(default_factory=list)
assert Node(1) < Node(2)
"""
PICKLE = """\
import copy, pickle
class Point: pass
assert isinstance(pickle.loads(pickle.dumps(Point())), Point) and copy.deepcopy(Point())
"""
HINTS = """\
from typing import NamedTuple, get_type_hints
class Pair(NamedTuple):
    one: 'Pair'
assert get_type_hints(Pair) == {'one': Pair}
"""
ENUM = """\
import enum, pickle
class Color(enum.Enum):
    RED = 1
assert pickle.loads(pickle.dumps(Color.RED)) is Color.RED
"""
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
        (f"```python\n{NODE}{DEF}```", CHECKS, 1.0, "passed"),
        (f"```python\nfrom __future__ import annotations\n{NODE}{DEF}```", CHECKS, 1.0, "passed"),
        (f"```python\n{PICKLE}{DEF}```", CHECKS, 1.0, "passed"),
        (f"```python\n{HINTS}{DEF}```", CHECKS, 1.0, "passed"),
        (f"```python\n{ENUM}{DEF}```", CHECKS, 1.0, "passed"),
        (f"```python\n{DEF}```", ["import answer\nassert answer.add(1, 2) == 3"], 1.0, "passed"),
        (r"print('a\x0cb')", [{"input": "", "output": "a\nb"}], 0.0, "failed"),
        (r"print('a\u2028b')", [{"input": "", "output": "a\nb"}], 0.0, "failed"),
        (r"print('a\x0cb')", [{"input": "", "output": "a\x0cb\r\n"}], 1.0, "passed"),
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
    filled = [(label, code) for label, code in blocks if code.strip()]
    python = [code for label, code in filled if label.strip().lower().startswith("py")]
    bare = [code for label, code in filled if not label]
    expected = next(reversed(python or bare), None)
    assert blocks == [("", "")] or code_in(answer) == (
        answer if expected is None else f"{expected}\n"
    )


@pytest.mark.parametrize("gap", ["", "\n"])
def test_a_block_in_tags_is_the_code(gap: str) -> None:
    assert code_in(f"So:\n<answer>{gap}```python\nprint(1)\n```{gap}</answer>") == "print(1)\n"


def test_a_fence_inside_a_line_is_no_block() -> None:
    assert code_in("```py\nx = '```'\n```\nIt prints ```1```.") == "x = '```'\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"1. Code:\n   ```python\n{indent(DEF, '   ')}   ```\n2. Done.",
        f"1. Code:\n\n    ```python\n{indent(DEF, '    ')}    ```\n",
        f"- Code:\n  - It:\n    ```python\n{indent(DEF, '    ')}    ```\n",
        f"1. Code:\n   ```python\n{DEF}   ```\n",
        f"> ```python\n{indent(DEF, '> ')}> ```\n",
        f"  ```python\n{indent(DEF, '  ')}  ```\n",
        f"{DEF}```",
        f"{DEF}````\n",
        f"{DEF}```\nThis adds two numbers.",
        f"Sure:\n```\n{DEF}    # and so",
        f"Sure:\n```python\n{DEF}",
        f"Sure:\n```\n{DEF}",
        f"~~~python\n{DEF}~~~",
        f"~~~~\n{DEF}~~~~",
        f"````python\n{DEF}````",
        f'```python title="a.py"\n{DEF}```',
        f"``` {{.python .numberLines}}\n{DEF}```",
        f"```{{python}}\n{DEF}```",
        f"```Python3.11\n{DEF}```",
        f"```python:a.py\n{DEF}```",
        f"```python\n{DEF}``` That is it.",
        f"```python\n{DEF}``` That is it.\n\nIt prints\n```\n3\n```\n",
        f"```python\n# a draft\n```python\n{DEF}```",
        f"```python\n{DEF}```\nOutput:\n```text\n3\n```",
        f"```bash\npython a.py\n```\n```\n{DEF}```",
        f"```python\r\n{DEF}```\r\n".replace("\n", "\r\n").replace("\r\r", "\r"),
        f"<answer>\n```python\n{DEF}```\n</answer>",
        f"<details>\n<summary>Code</summary>\n```python\n{DEF}```\n</details>",
        f"```python\n{DEF}```\n```python\n\n```",
        DEF,
    ],
)
def test_code_is_found_in_usual_markdown(answer: str) -> None:
    scope = dict[str, Any]()
    exec(code_in(answer), scope)
    assert scope["add"](1, 2) == 3


def test_a_docstring_may_have_a_fence() -> None:
    code = '''def add(a, b):\n    """Add.\n\n    ```python\n    add(1, 2)\n    ```\n    """\n'''
    assert code_in(f"```python\n{code}```") == code
    assert code_in(f"- So:\n\n  ```python\n{indent(code, '  ')}  ```") == code


@pytest.mark.parametrize("end", ["```", ""])
def test_a_draft_in_a_thought_is_not_run(reward: CodeReward, end: str) -> None:
    draft = WRONG.replace("Sure:", "<think>") + "</think>\n"
    said = reward(answered(f"{draft}```python\n{DEF}{end}", tests=CHECKS))
    assert said == (1.0, {"outcome": "passed", "passed": 2, "tests": 2})
    assert reward(answered(f"<think>{ADD}", tests=CHECKS))[0] == 0.0

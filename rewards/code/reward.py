"""Reward the code of an answer by the tests of its task, run in a sandbox.

A program that fails, takes too long or needs too much has reward 0.0, and the reward's detail says
which; a sandbox that does not start is no reward.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from rewards.answer import last_answer, metadata
from rewards.code.sandbox import Limits, Result, Sandbox
from schemas.records import Trajectory
from schemas.settings.reward_models import CodeTests

_FENCED = re.compile(r"^ {0,3}```([^\n`]*)\n(.*?)^ {0,3}```[ \t\r]*$", re.DOTALL | re.MULTILINE)
"""A fenced block of CommonMark: its label and its content."""
_TAG_AT_FENCE = re.compile(r"(?<=>)(?=```)|(?<=```)(?=<)")
_PYTHON = {"python", "python3", "py"}
_CHECKED = """\
def run():
    import json, os, sys
    given = json.loads(sys.stdin.buffer.read())
    code, test, passed = given["code"], given["test"], given["passed"]
    del given
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    flush, write, end = sys.stdout.flush, os.write, os._exit
    scope = {"__name__": "answer"}
    exec(compile(code, "answer", "exec"), scope)
    exec(compile(test, "test", "exec"), scope)
    flush()
    write(1, b"\\n" + passed.encode())
    end(0)
run()
"""
"""Runs the answer, then the test, then writes a word that the answer has not been told.

It ends at once: what the answer has left running writes nothing after the word.
"""

CodeReward = Callable[[Trajectory], tuple[float, dict[str, Any]]]


def code_tests(configuration: Mapping[str, Any]) -> CodeReward:
    """Return the reward function of a configuration (`CodeTests`).

    Raises:
        SandboxError: This machine has no sandbox.
    """
    settings = CodeTests.model_validate(configuration)
    sandbox = Sandbox(Limits(settings.memory_mb, settings.processes))

    def reward(trajectory: Trajectory) -> tuple[float, dict[str, Any]]:
        """Return the reward and its detail.

        Raises:
            ValueError: There are no tests or no answer.
            SandboxError: The sandbox did not start.
        """
        tests, code = tests_of(trajectory), code_in(last_answer(trajectory))
        deadline, passed, outcome = time.monotonic() + settings.timeout_s, 0, "passed"
        for test in tests:
            ended = _run(sandbox, code, test, deadline)
            passed += ended == "passed"
            outcome = ended if outcome == "passed" else outcome  # of the first that failed
            if ended == "timeout" or (ended != "passed" and not settings.partial):
                break
        value = passed / len(tests) if settings.partial else float(passed == len(tests))
        return value, {"outcome": outcome, "passed": passed, "tests": len(tests)}

    return reward


def tests_of(trajectory: Trajectory) -> list[str | dict[str, str]]:
    """Return the tests in the metadata: `tests`, Python text or {"input", "output"} of a program.

    Text that is JSON, as data sets in Parquet have it, is read as such: as Python it is a literal,
    which passes for every answer.

    Raises:
        ValueError: There are none, or one has another form.
    """
    tests = _parsed(metadata(trajectory).get("tests"))
    tests = [tests] if isinstance(tests, str | dict) else tests
    if not tests or not isinstance(tests, list):
        raise ValueError("metadata has no tests")
    tests = [_parsed(test) for test in tests]
    for test in tests:
        is_pair = isinstance(test, dict) and all(
            isinstance(test.get(name), str) for name in ("input", "output")
        )
        if not is_pair and not isinstance(test, str):
            raise ValueError('a test is Python text or {"input": TEXT, "output": TEXT}')
    return tests


def _parsed(tests: Any) -> Any:
    if not isinstance(tests, str):
        return tests
    try:
        return json.loads(tests)
    except ValueError:
        return tests


def code_in(answer: str) -> str:
    """Return the last fenced block of Python in an answer.

    Without one: the last block without a label, else the whole answer. A tag, such as <answer>, may
    stand in the line of a fence.
    """
    answer = _TAG_AT_FENCE.sub("\n", answer)
    blocks = [(label.strip().lower(), code) for label, code in _FENCED.findall(answer)]
    for accepted in (_PYTHON, {""}):
        found = [str(code) for label, code in blocks if label in accepted]
        if found:
            return found[-1]
    return answer


def _run(sandbox: Sandbox, code: str, test: str | dict[str, str], deadline: float) -> str:
    """Run one test; return `passed`, `failed`, `killed`, `timeout` or `memory`."""
    if isinstance(test, dict):
        result = sandbox.run(code, test["input"].encode(), deadline)
        is_right = _lines(result.stdout.decode("utf-8", "replace")) == _lines(test["output"])
    else:
        word = secrets.token_hex()
        given = json.dumps({"code": code, "test": test, "passed": word})
        result = sandbox.run(_CHECKED, given.encode(), deadline)
        is_right = result.stdout.endswith(b"\n" + word.encode())
    return _outcome(result, is_right)


def _outcome(result: Result, is_right: bool) -> str:
    if result.ending != "exited":
        return result.ending
    if result.code is not None and result.code < 0:
        return "killed"
    return "passed" if result.code == 0 and is_right else "failed"


def _lines(text: str) -> list[str]:
    """Return the lines without white space at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]

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

_FENCED = re.compile(r"```(?:python|python3|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_CHECKED = """\
import json, os, sys
given = json.loads(sys.stdin.buffer.read())
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
scope = {"__name__": "answer"}
exec(compile(given["code"], "answer", "exec"), scope)
exec(compile(given["test"], "test", "exec"), scope)
sys.stdout.flush()
os.write(1, b"\\n" + given["passed"].encode())
"""
"""Runs the answer, then the test, then writes a word that the answer has not been told."""

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

    Raises:
        ValueError: There are none, or one has another form.
    """
    tests = metadata(trajectory).get("tests")
    tests = [tests] if isinstance(tests, str | dict) else tests
    if not tests or not isinstance(tests, list):
        raise ValueError("metadata has no tests")
    for test in tests:
        is_pair = isinstance(test, dict) and all(
            isinstance(test.get(name), str) for name in ("input", "output")
        )
        if not is_pair and not isinstance(test, str):
            raise ValueError('a test is Python text or {"input": TEXT, "output": TEXT}')
    return tests


def code_in(answer: str) -> str:
    """Return the last fenced block of Python in an answer; the whole answer without one."""
    blocks = _FENCED.findall(answer)
    return str(blocks[-1]) if blocks else answer


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

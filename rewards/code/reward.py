"""Reward the code of an answer by the tests of its task, run in a sandbox.

A program that fails, takes too long or needs too much has reward 0.0, and the reward's detail says
which; a sandbox that does not start is no reward.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from markdown_it import MarkdownIt

from clawstream.rewards.answer import last_answer, metadata
from clawstream.rewards.code.sandbox import Limits, Result, Sandbox
from clawstream.schemas.records import Trajectory
from clawstream.schemas.settings.reward_models import CodeTests

_BLOCKS = MarkdownIt("zero").enable(["code", "fence", "list", "blockquote"])
"""CommonMark's blocks that hold code or move it, without HTML, which may surround it."""
_FENCES_ONLY = MarkdownIt("zero").enable("fence")
_FENCE = re.compile(r"^ {0,3}(?P<marks>`{3,}|~{3,})(?P<words>.+)$")
_LABEL = re.compile(r"[{\s.]*([\w+-]*(?:\.\d+)?)")
_TAG_AT_FENCE = re.compile(r"(?<=>)(?=```)|(?<=```)(?=<)")
_PYTHON = re.compile(r"(?:python|py)[\d.]*", re.IGNORECASE)
_CHECKED = """\
def run():
    import json, os, sys
    given = json.loads(sys.stdin.buffer.read())
    code, test, passed = given["code"], given["test"], given["passed"]
    del given
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    flush, write, end = sys.stdout.flush, os.write, os._exit
    module = sys.modules["answer"] = type(sys)("answer")
    scope = module.__dict__
    exec(compile(code, "answer", "exec"), scope)
    exec(compile(test, "test", "exec"), scope)
    flush()
    write(1, b"\\n" + passed.encode())
    end(0)
run()
"""
"""Runs the answer as a module, then the test in it, then writes a word that the answer has not
been told.

`dataclasses`, `pickle` and `typing` look up the module of a class in `sys.modules`. It ends at
once: what the answer has left running writes nothing after the word.
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
    """Return the last fenced block of Python in an answer, as CommonMark defines blocks.

    Without one: the last block without a label, else the whole answer. A tag, such as <answer>, may
    stand in the line of a fence, and words may follow a closing fence. A block that is not closed
    ends with the answer; where only the closing fence is there, the block begins with the answer.
    """
    answer = _TAG_AT_FENCE.sub("\n", answer)
    if (code := _before_lone_fence(answer)) is not None:
        return code
    for markdown in (_BLOCKS, _FENCES_ONLY):
        blocks = list(_blocks(answer, markdown))
        for is_accepted in (_PYTHON.fullmatch, lambda label: not label):
            found = [code for label, code in blocks if is_accepted(label) and code.strip()]
            if found:
                return found[-1]
    return answer


def _before_lone_fence(answer: str) -> str | None:
    """Return what precedes the only fence of an answer if that is a closing one; else None.

    Without a label it may be the opening one, too, of code that is cut: then Python follows it.
    """
    fences = [token for token in _BLOCKS.parse(answer) if token.type == "fence"]
    if len(fences) != 1 or fences[0].info.strip():
        return None
    (fence,) = fences
    assert fence.map is not None
    first, end = fence.map
    lines = fence.content.count("\n") + bool(fence.content and fence.content[-1] != "\n")
    is_closed = end - first == lines + 2
    before = "\n".join(answer.split("\n")[:first])
    if is_closed or not before.strip():
        return None
    if fence.content.strip() and (_is_python(fence.content) or not _is_python(before)):
        return None
    return before


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last of its own stack
        return False
    return True


def _blocks(answer: str, markdown: MarkdownIt) -> Iterator[tuple[str, str]]:
    """Yield the label and the code of each fenced block.

    A line of a block that would be its closing fence but for its words ends it; one that names
    Python begins another block.
    """
    for token in markdown.parse(answer):
        if token.type != "fence":
            continue
        label, lines, is_open = _label(token.info), list[str](), True
        for line in re.findall(r".*\n|.+$", token.content):
            fence = _FENCE.match(line.rstrip("\n"))
            if fence is None or not fence["marks"].startswith(token.markup):
                lines.append(line)
                continue
            if is_open:
                yield label, "".join(lines)
            label, lines = _label(fence["words"]), []
            is_open = _PYTHON.fullmatch(label) is not None
        if is_open:
            yield label, "".join(lines)


def _label(info: str) -> str:
    """Return the language of a fence: the first word of its info string."""
    match = _LABEL.match(info)
    return match[1] if match is not None else ""


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
    return [line.rstrip() for line in text.rstrip().split("\n")]

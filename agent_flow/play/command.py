"""Command lines as flows: any agent that reads its base URL from the environment."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawstream.agent_flow.child_environment import child_environment
from clawstream.agent_flow.errors import FlowError, RolloutFailed
from clawstream.agent_flow.file_tail import tail
from clawstream.agent_flow.flow import Flow, Limits
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task
from clawstream.agent_flow.threads import in_thread

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
MAX_OUTPUT = 1 << 20
"""Bytes of standard output that a grader gets: the last ones."""
LAUNCHER = Path(__file__).with_name("launcher.py")
END_S = 4.0
"""Seconds in which the launcher ends; above `launcher.KILL_S`."""
SHOWN_ERROR = 300
"""Characters of standard error in the reason of a failed rollout."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command did, for a grader. directory: where it ran; gone after the grading."""

    exit_code: int
    stdout: str
    stderr: str
    directory: Path


Grader = Callable[[Task, CommandResult], Any]


def command_flow(command: Sequence[str], reward: str, grader: Grader | None) -> Flow:
    """Return the flow that runs a command for each rollout.

    The command runs in an empty directory of its own, with `Rollout.environment`,
    CLAWSTREAM_TASK (the task as JSON) and CLAWSTREAM_REWARD_FILE.

    Args:
        command: arguments; `{name}` is replaced by the task's field of that name.
        reward: exit: 1.0 for exit code 0, else 0.0; file: a number or a JSON object that the
            command writes to CLAWSTREAM_REWARD_FILE; none: it comes later; grader: of `grader`.
        grader: function of the task and a `CommandResult` that returns the reward.

    Raises:
        FlowError: The command is empty.
    """
    if not command:
        raise FlowError(
            "no command; write it after `--`: flow exec tasks=FILE -- my-agent {prompt}"
        )

    async def play(task: Task, rollout: Rollout) -> Any:
        with tempfile.TemporaryDirectory(prefix="flow-") as name:
            result = await _run([_filled(word, task) for word in command], task, rollout, name)
            if reward == "exit" and result.exit_code >= 0:
                return float(result.exit_code == 0)
            if result.exit_code != 0:
                raise RolloutFailed(
                    f"exit code {result.exit_code}: {result.stderr[-SHOWN_ERROR:].strip()}"
                )
            if grader is not None:
                graded = await in_thread(grader, task, result)
                return await graded if asyncio.iscoroutine(graded) else graded
            return _written(result.directory / "reward") if reward == "file" else None

    return Flow(play, Limits(), Path(command[0]).stem)


def _filled(word: str, task: Task) -> str:
    """Replace `{name}` by the task's field. Other braces stay: a word may be code or JSON."""

    def value(match: re.Match[str]) -> str:
        if match[1] in task:
            return str(task[match[1]])
        if match[0] == word:
            raise RolloutFailed(f"argument {word}: the task has only {', '.join(sorted(task))}")
        return match[0]

    return _FIELD.sub(value, word)


async def _run(
    command: Sequence[str], task: Task, rollout: Rollout, directory: str
) -> CommandResult:
    work = Path(directory) / "work"
    work.mkdir()
    environment: Mapping[str, str] = {
        **child_environment(),
        **rollout.environment,
        "CLAWSTREAM_TASK": json.dumps(dict(task), default=str),
        "CLAWSTREAM_REWARD_FILE": str(work / "reward"),
    }
    out, err = Path(directory) / "stdout", Path(directory) / "stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        reply = await _launched(command, work, environment, stdout, stderr)
    if "error" in reply:
        raise RolloutFailed(f"{command[0]}: {reply['error']}")
    code = reply["exit"]
    return CommandResult(code, tail(out, MAX_OUTPUT), tail(err, MAX_OUTPUT), work)


async def _launched(
    command: Sequence[str], work: Path, environment: Mapping[str, str], stdout: Any, stderr: Any
) -> dict[str, Any]:
    """Run a command by the launcher (`clawstream.agent_flow.play.launcher`) and return its reply.

    When the caller is cancelled, or this process dies, the launcher kills whatever was started.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", LAUNCHER, str(os.getpid())),
            *command,
            stdin=theirs.fileno(),
            stdout=stdout,
            stderr=stderr,
            cwd=work,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                line = await reader.readline()
            finally:
                writer.close()
        finally:
            ours.close()
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()  # which kills the command
                await process.wait()
    reply: dict[str, Any] = json.loads(line or b'{"exit": -9}')
    return reply


def _written(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise RolloutFailed("the command wrote no reward to $CLAWSTREAM_REWARD_FILE") from error
    except ValueError as error:
        raise RolloutFailed(f"$CLAWSTREAM_REWARD_FILE is not JSON: {error}") from error

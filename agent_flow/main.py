"""`clawstream flow`: play flows and command lines; also `python -m clawstream.agent_flow`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from clawstream.agent_flow.environments.environment import load_environment
from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Flow, load_flow, load_function
from clawstream.agent_flow.gateway.client import Gateway
from clawstream.agent_flow.options import Mode, Words, api_key, options_of, parse_words, split_of
from clawstream.agent_flow.play.command import command_flow
from clawstream.agent_flow.play.progress import Progress
from clawstream.agent_flow.play.runner import Options, Runner
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task, tasks_of_file

INTERRUPTED = 130


def run_flow(
    spec: str | None, words: Sequence[str], mode: Mode, defaults: Mapping[str, Any]
) -> int:
    """Play a flow, or an environment.

    Args:
        spec: `FILE.py:NAME`; None: the environment that the word `env` names.
        words: `name=value`.
        mode: How to play it.
        defaults: Values of words that are not given.

    Returns:
        The exit code.

    Raises:
        FlowError: The flow, its tasks or an option is wrong, or the gateway cannot record.
    """
    given = parse_words(words, defaults)
    if (spec is None) == (given.env is None):
        raise FlowError("give either FILE.py:FLOW or env=LIBRARY:NAME")
    flow = load_flow(spec) if spec else load_environment(str(given.env), split_of(given, mode))
    options = options_of(given, flow.limits, mode)
    source = flow.source if given.tasks is None else _file(given)
    return _play(flow, source, given, options)


def run_command(
    command: Sequence[str], words: Sequence[str], mode: Mode, defaults: Mapping[str, Any]
) -> int:
    """Play a command line for each task. Returns the exit code.

    Raises:
        FlowError: See `run_flow`.
    """
    given = parse_words(words, defaults)
    if given.tasks is None:
        raise FlowError("tasks: not set; give tasks=FILE.jsonl with a task a line")
    grader = None if given.reward in ("exit", "file", "none") else load_function(given.reward)
    flow = command_flow(command, given.reward, grader)
    return _play(flow, _file(given), given, options_of(given, flow.limits, mode))


def _file(words: Words) -> Callable[[], Iterable[Task]]:
    path = words.tasks
    assert path is not None
    return lambda: tasks_of_file(path)


def _play(flow: Flow, source: Callable[[], Iterable[Task]], words: Words, options: Options) -> int:
    progress = Progress()
    try:
        last = asyncio.run(_playing(flow, source, words, options, progress))
    except BaseExceptionGroup as errors:
        wrong, _ = errors.split(FlowError)
        if wrong is None:
            raise
        raise _first(wrong) from None
    except asyncio.CancelledError:
        print(json.dumps(progress.summary()))
        return INTERRUPTED
    if options.dry and last is not None:
        for message in (m for chat in last.chats for m in chat):
            print(json.dumps(message, ensure_ascii=False))
    print(json.dumps(progress.summary()))
    return 0 if progress.succeeded else 1


async def _playing(
    flow: Flow,
    source: Callable[[], Iterable[Task]],
    words: Words,
    options: Options,
    progress: Progress,
) -> Rollout | None:
    current = asyncio.current_task()
    assert current is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, current.cancel)
    async with Gateway(words.gateway, api_key()) as gateway:
        runner = Runner(flow, gateway, options, progress)
        with progress:
            await runner.play(source)
    return runner.last


def _first(errors: BaseExceptionGroup[FlowError]) -> FlowError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, FlowError)
    return error


def main() -> None:
    """Command line of the SDK alone: `python -m clawstream.agent_flow run|exec ...`."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    own, command = words[:at], words[at + 1 :]
    flags = {"--eval", "--dry"}
    mode = Mode(evaluate="--eval" in own, dry="--dry" in own)
    try:
        match [word for word in own if word not in flags]:
            case ["run", *options] if options and "=" in options[0]:
                raise SystemExit(run_flow(None, options, mode, {}))
            case ["run", flow, *options]:
                raise SystemExit(run_flow(flow, options, mode, {}))
            case ["exec", *options] if command:
                raise SystemExit(run_command(command, options, mode, {}))
    except FlowError as error:
        print(f"agent_flow: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(
        "usage: python -m clawstream.agent_flow run FILE.py:FLOW [name=value]... [--eval | --dry]\n"
        "       python -m clawstream.agent_flow run env=LIBRARY:NAME [name=value]... "
        "[--eval | --dry]\n"
        "       python -m clawstream.agent_flow exec tasks=FILE [name=value]... -- COMMAND...",
        file=sys.stderr,
    )
    raise SystemExit(2)

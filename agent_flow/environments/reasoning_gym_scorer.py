"""Score answers of a reasoning-gym data set in a process of its own.

Some data sets evaluate the answer as Python. Started by
`clawstream.agent_flow.environments.reasoning_gym`; imports nothing of Clawstream. The argument is a
JSON object: `name` of the data set and its `config`. Requests come on standard input, replies go to
standard output, a JSON object a line:

    <- {"ready": true}                                                     once
    -> {"entry": "base64 of the pickled entry", "answer": "..."}
    <- {"score": 1.0} or {"error": "why"}

The entry is sent because a data set may generate another one in another process (it may depend on
Python's hash seed). Each answer is scored in a fork, so it changes nothing for the next one.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import pickle
import resource
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import reasoning_gym

WALL_S = 10.0
CPU_S = 5
MEMORY_BYTES = 1 << 30
"""Address space of a fork above what the process has itself."""
LONGEST_REPLY = 2000
"""Bytes: one write to a pipe."""


def main() -> None:
    """Score the answers of standard input until its end."""
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get among the replies
    argument = json.loads(sys.argv[1])
    dataset = reasoning_gym.create_dataset(argument["name"], **argument["config"])
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        entry = pickle.loads(base64.b64decode(request["entry"]))
        reply = reply_to(dataset, request["answer"], entry, replies.fileno())
        print(json.dumps(reply), file=replies, flush=True)


def reply_to(dataset: Any, answer: str | None, entry: Any, replies: int) -> dict[str, Any]:
    """Score an answer in a fork; one that exceeds a limit or ends its process scores 0.0.

    Args:
        dataset: of reasoning-gym.
        answer: to score; None: the reply has none.
        entry: of the data set.
        replies: file descriptor that the fork must not have.

    Returns:
        `score` or `error`.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _die_with_parent()
            os.setsid()
            os.close(replies)
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            _limit()
            os.write(writing, json.dumps(_scored(dataset, answer, entry)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    # Not until the end of the pipe: a process that the answer started may hold it.
    told = os.read(reading, LONGEST_REPLY) if select.select([reading], [], [], WALL_S)[0] else b""
    os.close(reading)
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reply: dict[str, Any] = json.loads(told or b'{"score": 0.0}')
    return reply


def _die_with_parent() -> None:
    """Ask the kernel for a SIGKILL when the parent dies: the flow, or the scorer of a fork."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    for limit, value in (
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _scored(dataset: Any, answer: str | None, entry: Any) -> dict[str, Any]:
    try:
        return {"score": float(dataset.score_answer(answer, entry))}
    except MemoryError:
        return {"score": 0.0}
    except Exception as error:  # noqa: BLE001 - of the data set
        return {"error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    main()

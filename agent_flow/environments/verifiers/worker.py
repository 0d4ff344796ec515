"""Play tasks of a verifiers environment, in a process with the Python that has verifiers.

Started by `clawstream.agent_flow.environments.verifiers.client`; imports nothing of Clawstream. The
argument is a JSON object: `id` of the taskset, `channel`, `size`, `config` (verifiers' own
configuration of an environment) and `tasks`, a file to which the tasks are written as JSON lines.
Requests come on standard input, replies go to standard output, a JSON object a line:

    <- {"ready": true} or {"refused": "why"}                               once
    -> {"id": 7, "task": 3, "base_url": "...", "api_key": "...", "model": "policy", "sampling": {}}
    <- {"id": 7, "rewards": {"exact": 1.0}} or {"id": 7, "error": "why"}
    -> {"id": 7, "cancel": true}                                 the answer is an error, at once

The end of standard input ends the process. Written for verifiers 0.4.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import inspect
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import (
    default_harness_id,
    load_environment,
    resolve_env_config,
    taskset_config_type,
)

ROLLOUTS_OF_ONE_SERVING = 200
"""`Env.serving()` keeps an HTTP client for each rollout until it ends."""
LONGEST_ERROR = 2000
"""Characters: the other process reads lines of limited length."""
SPLITS = {"train": ("train",), "val": ("val", "validation", "eval", "test")}
"""Names of a channel's split, the preferred one first."""
Json = dict[str, Any]


class Refused(Exception):
    """The environment or its configuration cannot be played; the message is for the user."""


class Environment:
    """One environment and its tasks. seat: name of the agent that is trained."""

    def __init__(self, ident: str, channel: str, size: int | None, config: Json) -> None:
        """Raises Refused."""
        self._config = _completed(ident, channel, config)
        self.seat = _trained_seat(self._config)
        env = self.load()
        _check_tool_servers(env.taskset)
        if size is None and not env.taskset.bounded:
            raise Refused(f"{ident} has tasks without end; set size=NUMBER")
        if env.taskset.bounded or size is None:
            self.tasks = list(env.taskset if size is None else env.taskset.take(size))
        else:  # every second one for each channel
            self.tasks = list(env.taskset.take(2 * size))[int(channel == "val") :: 2]

    def load(self) -> Any:
        """Return a new `Env`."""
        return load_environment(self._config)

    def write_tasks(self, path: Path) -> None:
        """Write the tasks as the SDK takes them, unless a process before this one has."""
        if path.exists():
            return
        with path.open("w") as file:
            for index, task in enumerate(self.tasks):
                data = task.data.model_dump(mode="json", exclude_none=True)
                name = task.data.id or task.data.name or index
                file.write(json.dumps({"id": name, "index": index, "data": data}) + "\n")


def _completed(ident: str, channel: str, given: Json) -> Any:
    """Return verifiers' configuration: agents are local processes and run no code by default."""
    config = copy.deepcopy(given)
    taskset = config.setdefault("taskset", {})
    taskset["id"] = ident
    field = taskset_config_type(ident).model_fields.get("split")
    if "split" not in taskset and field and get_origin(field.annotation) is Literal:
        has = get_args(field.annotation)
        for name in [name for name in SPLITS[channel] if name in has][:1]:
            taskset["split"] = name
    for seat, agent in agent_config_fields(resolve_env_config(copy.deepcopy(config))).items():
        own = config.setdefault(seat, {})
        own.setdefault("runtime", {"type": "subprocess"})  # verifiers' default: a cloud sandbox
        if agent.harness is None and default_harness_id(ident) == "bash":
            own["harness"] = {"id": "null"}
    return resolve_env_config(config)


def _trained_seat(config: Any) -> str:
    seats = [name for name, agent in agent_config_fields(config).items() if agent.client is None]
    if len(seats) != 1:
        raise Refused(
            f"agents {', '.join(seats) or 'none'} use the model that is trained; one can. Give the "
            'others a model of their own: env_config=\'{"NAME": {"model": ..., "client": ...}}\''
        )
    seat: str = seats[0]
    return seat


def _check_tool_servers(taskset: Any) -> None:
    """Refuse a tool server that would never answer.

    verifiers starts one as `python -m MODULE` in an empty directory, and waits three minutes for
    its port, whether or not the process has ended.
    """
    task = taskset.task_type()
    for tools in [*taskset.toolsets(taskset.config), *task.toolsets(taskset.config.task)]:
        module = sys.modules[type(tools).__module__]
        if not tools.config.url and "__main__" not in inspect.getsource(module):
            raise Refused(
                f"{module.__name__} serves the tools {type(tools).__name__}, so it must end in "
                f'`if __name__ == "__main__": {type(tools).__name__}.run()`'
            )


class Player:
    """Plays the requests of standard input until its end."""

    def __init__(self, environment: Environment, out: Any) -> None:
        self._environment, self._out = environment, out
        self._requests: asyncio.Queue[Json | None] = asyncio.Queue()
        self._playing: dict[int, asyncio.Task[None] | None] = {}  # None: not begun yet
        self._cancelled: set[int] = set()
        self._ended = False

    async def run(self, lines: asyncio.StreamReader) -> None:
        """Play until the lines end; then stop rollouts in progress."""
        reading = asyncio.create_task(self._read(lines))
        async with asyncio.TaskGroup() as servings:
            while not self._ended:
                full = asyncio.Event()
                servings.create_task(self._serving(full))
                await full.wait()
        await reading

    async def _read(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            request = json.loads(line)
            if "cancel" not in request:
                self._playing[request["id"]] = None
                self._requests.put_nowait(request)
                continue
            if request["id"] in self._playing:
                self._cancelled.add(request["id"])
                if playing := self._playing[request["id"]]:
                    playing.cancel()
            self._reply(request["id"], error="cancelled")
        self._ended = True
        self._requests.put_nowait(None)
        for task in filter(None, self._playing.values()):
            task.cancel()

    async def _serving(self, full: asyncio.Event) -> None:
        """Play some rollouts with the tool servers and HTTP clients of one `Env.serving()`."""
        env = self._environment.load()
        try:
            async with env.serving(), asyncio.TaskGroup() as rollouts:
                for _ in range(ROLLOUTS_OF_ONE_SERVING):
                    request = await self._requests.get()
                    if request is None:
                        return
                    playing = rollouts.create_task(self._play(env, request))
                    playing.add_done_callback(partial(self._forget, request["id"]))
                    self._playing[request["id"]] = playing
                full.set()
        finally:
            full.set()

    async def _play(self, env: Any, request: Json) -> None:
        # Programs of agents do not inherit variables with API_KEY in their names.
        number, variable = request["id"], f"ROLLOUT_{request['id']}_API_KEY"
        os.environ[variable] = request["api_key"]
        try:
            if number in self._cancelled:
                return
            client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            sampling = vf.SamplingConfig(**request["sampling"])
            context = vf.ModelContext(model=request["model"], client=client, sampling=sampling)
            (slot,) = env.slots(self._environment.tasks[request["task"]])
            episode = await env.run_slot(slot, context)
            self._reply(number, **result_of(episode, self._environment.seat))
        except Exception as error:  # noqa: BLE001 - of the user's environment
            self._reply(number, error=_shown(error))
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current and current.cancelling():
                raise
            self._reply(number, error="verifiers cancelled the rollout")
        finally:
            del os.environ[variable]

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        self._playing.pop(number, None)
        self._cancelled.discard(number)

    def _reply(self, number: int, **reply: Any) -> None:
        print(json.dumps({"id": number, **reply}), file=self._out, flush=True)


def result_of(episode: Any, seat: str) -> Json:
    """Return the weighted rewards of the trained agent by name, or the last error."""
    if not episode.ok:
        errors = [*(e for trace in episode.traces for e in trace.errors), *episode.errors]
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "a time limit has expired"
        return {"error": last[:LONGEST_ERROR]}
    rewards: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items() if trace.agent.name == seat else ():
            if reward is not None:
                rewards[name] = rewards.get(name, 0.0) + reward.value
    return {"rewards": rewards}


def _shown(error: Exception) -> str:
    name = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
    return f"{name}{error}"[:LONGEST_ERROR]


async def main(argument: Json, out: Any) -> None:
    """Load the environment, say so, and play."""
    try:
        environment = Environment(
            argument["id"], argument["channel"], argument["size"], argument["config"]
        )
        environment.write_tasks(Path(argument["tasks"]))
    except Exception as error:  # noqa: BLE001 - shown by the process that has started this one
        print(json.dumps({"refused": _shown(error)}), file=out, flush=True)
        return
    print(json.dumps({"ready": True}), file=out, flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    await Player(environment, out).run(lines)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the flow
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get among the replies
    asyncio.run(main(json.loads(sys.argv[1]), replies))

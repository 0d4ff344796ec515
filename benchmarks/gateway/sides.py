"""The sides of `benchmarks.gateway`: our gateway, forwarders, peers, and the engine behind them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.gateway.http_load import Outcome, load
from benchmarks.processes import Process, running
from clawstream.gateway.auth.api_keys import create_key
from clawstream.runtime.broker.embedded import EmbeddedBroker

PEERS = Path(".venv-peers/bin")
LITELLM_KEY = "sk-" + "0123456789abcdef" * 4
"""It does not start without one."""
LITELLM_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MASTER_KEY": LITELLM_KEY,
}


@dataclass
class Side:
    """One server under load. calls: Of a round. path: Of the n-th call."""

    process: Process
    port: int
    calls: int = 0
    path: Callable[[int], str] = lambda i: "/v1/chat/completions"
    headers: str = ""
    cpu_us: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, i: int, body: bytes) -> bytes:
        """Return the bytes of the i-th call."""
        head = (
            f"POST {self.path(i)} HTTP/1.1\r\nhost: localhost\r\n"
            "content-type: application/json\r\nuser-agent: OpenAI/Python 3.54.0\r\n"
            "accept: application/json\r\nx-stainless-retry-count: 0\r\n"
            f"{self.headers}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def drive(self, body: bytes, calls: int, concurrency: int) -> Outcome:
        """Make calls. Ends the benchmark unless every call succeeds."""
        outcome = uvloop.run(load(self.port, lambda i: self.request(i, body), calls, concurrency))
        if outcome.failed:
            raise SystemExit(
                f"{self.process.name}: {outcome.failed} of {calls} calls failed: "
                f"{outcome.first_failure!r}"
            )
        return outcome

    def cpu_s_per_call(self, body: bytes, calls: int, concurrency: int) -> float:
        """Make calls; return CPU seconds of the side's processes a call."""
        before = self.process.cpu_s()
        self.drive(body, calls, concurrency)
        return (self.process.cpu_s() - before) / calls


class Bench:
    """Starts the processes of one run, on ports from `first`; they end with `stack`."""

    def __init__(self, stack: ExitStack, directory: Path, first: int) -> None:
        self._stack, self._directory, self._port = stack, directory, first
        broker = EmbeddedBroker(directory / "kafka", self._new_port())
        self._kafka = stack.enter_context(broker).bootstrap_servers
        self._port += 20

    def _new_port(self) -> int:
        self._port += 1
        return self._port

    def _start(
        self,
        name: str,
        port: int,
        command: Sequence[str],
        ready: str,
        environment: dict[str, str] | None = None,
    ) -> Process:
        """Start a process and wait until the path `ready` answers."""
        log = self._directory / f"{name}.log"
        process = self._stack.enter_context(running(name, command, log, environment))
        process.until_answers(f"http://127.0.0.1:{port}{ready}")
        return process

    def engine(self, *options: str) -> Side:
        """An instant engine."""
        port = self._new_port()
        command = _python("benchmarks.gateway.instant_engine", "--port", str(port), *options)
        return Side(self._start(f"engine-{port}", port, command, "/health"), port)

    def gateway(
        self, name: str, engine: Side, calls: int = 0, *words: str, kind: str = "auto"
    ) -> Side:
        """Our gateway; an API key is required. Trajectories have eight calls."""
        port, data = self._new_port(), self._directory / name
        key = create_key(data / "api-keys.json", "bench", ("agent",))
        gateway = {"port": port, "gateway_id": name, "auth": "required"}
        settings = {
            "data_dir": str(data),
            "kafka": {"bootstrap_servers": self._kafka},
            "gateway": {**gateway, "upstreams": [{"url": engine.url, "kind": kind}]},
        }
        file = self._directory / f"{name}.yaml"
        file.write_text(json.dumps(settings))
        command = _python("clawstream", "gateway", "--config", str(file), *words)
        return Side(
            self._start(name, port, command, "/ready"),
            port,
            calls,
            lambda i: f"/t{i // 8}/g{i // 64}/v1/chat/completions",
            f"authorization: Bearer {key}\r\n",
        )

    def forwarder(self, stack: str, engine: Side, calls: int) -> Side:
        """A forwarder that records nothing. stack: "asgi" or "fastapi"."""
        port = self._new_port()
        command = _python(
            *("benchmarks.gateway.bare_forwarder", "--port", str(port)),
            *("--upstream", engine.url, "--stack", stack),
        )
        # FastAPI serves this path itself; the other forwarder asks the engine, which answers all.
        return Side(self._start(stack, port, command, "/openapi.json"), port, calls)

    def litellm(self, engine: Side, calls: int) -> Side:
        """LiteLLM's proxy, one worker, no database."""
        port, config = self._new_port(), self._directory / "litellm.yaml"
        model = {"model": "openai/policy", "api_base": f"{engine.url}/v1", "api_key": "none"}
        models = [{"model_name": "policy", "litellm_params": model}]
        config.write_text(json.dumps({"model_list": models}))
        command = [str(PEERS / "litellm"), "--config", str(config)]
        command += ["--port", str(port), "--host", "127.0.0.1"]
        process = self._start("litellm", port, command, "/health/liveliness", LITELLM_ENVIRONMENT)
        return Side(process, port, calls, headers=f"authorization: Bearer {LITELLM_KEY}\r\n")

    def router(self, engine: Side, calls: int) -> Side:
        """vllm-router, round robin."""
        port = self._new_port()
        command = [str(PEERS / "vllm-router"), "--worker-urls", engine.url]
        command += ["--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(self._new_port())]
        return Side(self._start("router", port, command, "/health"), port, calls)


def _python(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", module, *words]

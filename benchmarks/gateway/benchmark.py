"""What the gateway costs a call, side by side with what others would use. Prints one JSON line.

    make bench-gateway                          all sides, a few minutes
    python -m benchmarks.gateway --check        few calls, no peers: whether the benchmark itself
                                                still works

Every side serves the same calls against one instant engine (`instant_engine`), in rounds that
alternate the sides; a figure is the median over the rounds. CPU is that of the side's processes,
user and system, all threads; the broker's, the engine's and the client's are not in it. Ours is the
process that `clawstream gateway` starts, with its default settings, an API key required, and the
awaited acknowledgement of a real Kafka; `redaction` is the same with redaction on, `unconfirmed`
with gateway.acks=none, `vllm` against an engine without our middleware.

    cpu_us_per_call                 ours, microseconds
    passthrough_cpu_us_per_call     an ASGI forwarder on aiohttp that records nothing: the floor of
                                    this stack
    fastapi_httpx_cpu_us_per_call   FastAPI and httpx, records nothing
    litellm_cpu_us_per_call, router_cpu_us_per_call     LiteLLM's proxy and vllm-router (Rust)
    redaction_cpu_us_per_call       what redaction adds
    added_p50_ms, added_p99_ms      one call at a time, without the wait for Kafka: latency less
                                    that of the engine alone
    added_p50_ms_acked              the same with the wait
    sse_cpu_us_per_event            streams of 101 events, 32 at once
    long_prompt_ms, long_prompt_cpu_ms    a call of 100,000 prompt tokens
    streams_1000_rss_growth_pct     1,000 streams at once in one process, second wave against the
                                    first
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.gateway.http_load import Outcome, load
from gateway.auth.api_keys import create_key
from runtime.broker.embedded import EmbeddedBroker
from runtime.process.child import die_with_parent

PEERS = Path(".venv-peers/bin")
LITELLM_KEY = "sk-" + "0123456789abcdef" * 4
"""It does not start without one."""
START_S = 120.0


@dataclass
class Side:
    """One server under load. calls: of a round. path: of the n-th call."""

    name: str
    port: int
    calls: int
    path: Callable[[int], str] = lambda i: "/v1/chat/completions"
    headers: str = ""
    process: psutil.Process | None = None
    cpu_us: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        assert self.process is not None
        family = [self.process, *self.process.children(recursive=True)]
        return sum(sum(p.cpu_times()[:2]) for p in family)

    def rss(self) -> int:
        """Resident bytes."""
        assert self.process is not None
        return int(self.process.memory_info().rss)


def body_of(stream: bool = False, chars: int = 4000) -> bytes:
    """A request of 4.5 KB: system prompt, two turns, a tool."""
    messages = [
        {"role": "system", "content": "You are a careful agent. " * (chars // 50)},
        {"role": "user", "content": "What is the price of k374 plus 2? " * (chars // 70)},
    ]
    tool = {
        "type": "function",
        "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}},
    }
    said: dict[str, Any] = {
        "model": "policy",
        "messages": messages,
        "temperature": 1.0,
        "max_tokens": 256,
        "tools": [tool],
    }
    return orjson.dumps(said | ({"stream": True} if stream else {}))


def requests_of(side: Side, body: bytes) -> Callable[[int], bytes]:
    """The bytes of the n-th call."""

    def request(i: int) -> bytes:
        head = (
            f"POST {side.path(i)} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            "user-agent: OpenAI/Python 3.54.0\r\naccept: "
            "application/json\r\nx-stainless-retry-count: 0\r\n"
            f"{side.headers}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    return request


def drive(side: Side, body: bytes, calls: int, concurrency: int) -> Outcome:
    """Make calls; every one must be answered."""
    import uvloop

    outcome = uvloop.run(load(side.port, requests_of(side, body), calls, concurrency))
    if outcome.failed:
        raise SystemExit(
            f"{side.name}: {outcome.failed} of {calls} calls failed: {outcome.first_failure!r}"
        )
    return outcome


def measure(side: Side, body: bytes, calls: int, concurrency: int) -> float:
    """CPU seconds a call."""
    before = side.cpu_s()
    drive(side, body, calls, concurrency)
    return (side.cpu_s() - before) / calls


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[psutil.Process]:
    """A process of ours, stopped at the end, and killed when this process ends in any other way."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            die_with_parent(command),
            stdout=out,
            stderr=out,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def until_answers(url: str, process: psutil.Process, log: Path) -> None:
    """Wait for a 200."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        if (
            not process.is_running()
            or process.status() == psutil.STATUS_ZOMBIE
            or time.monotonic() > deadline
        ):
            raise SystemExit(f"{url} did not answer; the log ends:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


class Bench:
    """All processes of one run, on ports from `first`."""

    def __init__(self, stack: ExitStack, directory: Path, first: int) -> None:
        self._stack, self._directory, self._port = stack, directory, first
        self._kafka = stack.enter_context(
            EmbeddedBroker(directory / "kafka", self.port())
        ).bootstrap_servers
        self._port += 20

    def port(self) -> int:
        """A port of its own."""
        self._port += 1
        return self._port

    def start(
        self,
        name: str,
        command: Sequence[str],
        ready: str,
        environment: dict[str, str] | None = None,
    ) -> psutil.Process:
        """A process that is ready when the URL answers."""
        log = self._directory / f"{name}.log"
        process = self._stack.enter_context(running(command, log, environment))
        until_answers(ready, process, log)
        return process

    def engine(self, *options: str) -> Side:
        """An instant engine."""
        port = self.port()
        command = [
            sys.executable,
            "-m",
            "benchmarks.gateway.instant_engine",
            "--port",
            str(port),
            *options,
        ]
        process = self.start(f"engine-{port}", command, f"http://127.0.0.1:{port}/health")
        return Side("engine", port, 0, process=process)

    def gateway(self, name: str, engine: Side, calls: int, *words: str, kind: str = "auto") -> Side:
        """Our gateway, an API key required."""
        port, data = self.port(), self._directory / name
        key = create_key(data / "api-keys.json", "bench", ("agent",))
        settings = self._directory / f"{name}.yaml"
        settings.write_text(
            json.dumps({
                "data_dir": str(data),
                "kafka": {"bootstrap_servers": self._kafka},
                "gateway": {
                    "port": port, "gateway_id": name, "auth": "required",
                    "upstreams": [{"url": f"http://127.0.0.1:{engine.port}", "kind": kind}],
                },
            })
        )  # fmt: skip
        command = [sys.executable, "-m", "clawstream", "gateway", "--config", str(settings), *words]
        process = self.start(name, command, f"http://127.0.0.1:{port}/ready")
        # Trajectories of eight calls.
        return Side(
            name, port, calls, lambda i: f"/t{i // 8}/g{i // 64}/v1/chat/completions",
            f"authorization: Bearer {key}\r\n", process,
        )  # fmt: skip

    def forwarder(self, stack: str, engine: Side, calls: int) -> Side:
        """A forwarder that records nothing."""
        port = self.port()
        command = [
            sys.executable, "-m", "benchmarks.gateway.bare_forwarder", "--port", str(port),
            "--upstream", f"http://127.0.0.1:{engine.port}", "--stack", stack,
        ]  # fmt: skip
        log = self._directory / f"{stack}.log"
        process = self._stack.enter_context(running(command, log))
        side = Side(stack, port, calls, process=process)
        self._until_open(side, log)
        return side

    def _until_open(self, side: Side, log: Path) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                asyncio.run(load(side.port, requests_of(side, body_of()), 1, 1))
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise SystemExit(
                        f"{side.name} does not listen; the log ends:\n{log.read_text()[-3000:]}"
                    ) from None
                time.sleep(0.2)

    def litellm(self, engine: Side, calls: int) -> Side:
        """LiteLLM's proxy, one worker, no database."""
        port, config = self.port(), self._directory / "litellm.yaml"
        model = {
            "model": "openai/policy",
            "api_base": f"http://127.0.0.1:{engine.port}/v1",
            "api_key": "none",
        }
        config.write_text(
            json.dumps({"model_list": [{"model_name": "policy", "litellm_params": model}]})
        )
        command = [
            str(PEERS / "litellm"),
            "--config",
            str(config),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
        ]
        quiet = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
            "LITELLM_LOG": "ERROR",
            "LITELLM_MASTER_KEY": LITELLM_KEY,
        }
        process = self.start(
            "litellm", command, f"http://127.0.0.1:{port}/health/liveliness", quiet
        )
        return Side(
            "litellm",
            port,
            calls,
            headers=f"authorization: Bearer {LITELLM_KEY}\r\n",
            process=process,
        )

    def router(self, engine: Side, calls: int) -> Side:
        """vllm-router, round robin."""
        port = self.port()
        command = [
            str(PEERS / "vllm-router"),
            "--worker-urls",
            f"http://127.0.0.1:{engine.port}",
            "--policy",
            "round_robin",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--prometheus-port",
            str(self.port()),
        ]
        process = self.start("router", command, f"http://127.0.0.1:{port}/health")
        return Side("router", port, calls, process=process)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which so much of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cpu_rounds(sides: Sequence[Side], rounds: int, concurrency: int) -> dict[str, float]:
    """CPU microseconds a call of each side, the rounds alternating them."""
    body = body_of()
    for side in sides:
        drive(
            side, body, max(20, side.calls // 10), concurrency
        )  # warm: caches, connections, byte code
    for at in range(rounds):
        for side in sides if at % 2 == 0 else reversed(sides):
            side.cpu_us.append(1e6 * measure(side, body, side.calls, concurrency))
    return {side.name: statistics.median(side.cpu_us) for side in sides}


def latency(
    engine: Side, sides: Sequence[Side], rounds: int, calls: int
) -> dict[str, tuple[float, float]]:
    """Added milliseconds at concurrency 1: median and 99th percentile over those of the engine
    alone, medians over the rounds.
    """
    body = body_of()
    found: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for _ in range(rounds):
        direct = drive(engine, body, calls, 1).latencies_s
        for side in sides:
            through = drive(side, body, calls, 1).latencies_s
            found[side.name].append(
                tuple(1e3 * (percentile(through, q) - percentile(direct, q)) for q in (0.5, 0.99))  # type: ignore[arg-type]
            )
    return {
        name: (statistics.median(p[0] for p in f), statistics.median(p[1] for p in f))
        for name, f in found.items()
    }


def posts_per_call(engine: Side, side: Side, calls: int) -> float:
    """How many requests the engine gets for a call."""

    def asked() -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/asked", timeout=5) as reply:
            return int(reply.read())

    before = asked()
    drive(side, body_of(), calls, 8)
    return (asked() - before) / calls


def loop_ns() -> float:
    """CPU nanoseconds of one turn of an empty Python loop, median of five: how fast this machine is
    just now.
    """
    turns, found = 1_000_000, []
    for _ in range(5):
        began = time.process_time()
        for _ in range(turns):
            pass
        found.append(1e9 * (time.process_time() - began) / turns)
    return round(statistics.median(found), 1)


def machine() -> dict[str, Any]:
    """Where it ran."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "empty_loop_ns": loop_ns(),
        "load1": round(os.getloadavg()[0], 2),
    }


def streams(gateway: Side, rounds: int, calls: int, events: int) -> float:
    """CPU microseconds an event."""
    body = body_of(stream=True)
    drive(gateway, body, 20, 8)
    return statistics.median(
        1e6 * measure(gateway, body, calls, 32) / events for _ in range(rounds)
    )


def many_streams(gateway: Side, count: int) -> tuple[int, float]:
    """Streams at once, and how much the second wave adds to the memory of the first, in percent."""
    body = body_of(stream=True)
    drive(gateway, body, count, count)
    first = gateway.rss()
    for _ in range(3):
        drive(gateway, body, count, count)
    return count, 100.0 * (gateway.rss() - first) / first


def run(directory: Path, port: int, check: bool) -> dict[str, Any]:
    """All of it."""
    scale, rounds = (0.02, 1) if check else (1.0, 5)

    def calls(n: int) -> int:
        return max(30, int(n * scale))

    with ExitStack() as stack:
        bench = Bench(stack, directory, port)
        engine = bench.engine()
        slow = bench.engine("--pause-ms", "10")
        long = bench.engine("--prompt", "100000", "--response", "200")
        ours = bench.gateway("ours", engine, calls(4000))
        unconfirmed = bench.gateway("unconfirmed", engine, calls(2000), "gateway.acks=none")
        redacting = bench.gateway(
            "redaction", engine, calls(2000), "gateway.redaction.enabled=true"
        )
        plain_vllm = bench.gateway("vllm", engine, calls(2000), kind="vllm")
        sides = [
            ours,
            unconfirmed,
            redacting,
            plain_vllm,
            bench.forwarder("asgi", engine, calls(4000)),
            bench.forwarder("fastapi", engine, calls(1000)),
        ]
        if not check:
            sides += [bench.litellm(engine, 200), bench.router(engine, calls(4000))]
        asked = posts_per_call(engine, ours, calls(400))
        cpu = cpu_rounds(sides, rounds, 32)
        added = latency(engine, [ours, unconfirmed], rounds, calls(500))
        streaming = bench.gateway("streaming", slow, 0)
        sse = streams(streaming, rounds, calls(320), 101)
        count, growth = many_streams(streaming, 50 if check else 1000)
        heavy = bench.gateway("heavy", long, 0)
        drive(heavy, body_of(chars=400_000), 2, 1)
        prompt_cpu = measure(heavy, body_of(chars=400_000), calls(50), 1)
        prompt_ms = 1e3 * statistics.median(
            drive(heavy, body_of(chars=400_000), calls(50), 1).latencies_s
        )
    result = {
        "benchmark": "gateway",
        "check": check,
        "upstream_requests_per_call": asked,
        "reply_bytes": 9400,
        "cpu_us_per_call": cpu["ours"],
        "passthrough_cpu_us_per_call": cpu["asgi"],
        "fastapi_httpx_cpu_us_per_call": cpu["fastapi"],
        "litellm_cpu_us_per_call": cpu.get("litellm"),
        "router_cpu_us_per_call": cpu.get("router"),
        "unconfirmed_cpu_us_per_call": cpu["unconfirmed"],
        "vllm_cpu_us_per_call": cpu["vllm"],
        "redaction_cpu_us_per_call": cpu["redaction"] - cpu["ours"],
        "added_p50_ms": added["unconfirmed"][0],
        "added_p99_ms": added["unconfirmed"][1],
        "added_p50_ms_acked": added["ours"][0],
        "added_p99_ms_acked": added["ours"][1],
        "sse_cpu_us_per_event": sse,
        "streams_at_once": count,
        "streams_rss_growth_pct": growth,
        "long_prompt_ms": prompt_ms,
        "long_prompt_cpu_ms": 1e3 * prompt_cpu,
        "ratio_to_passthrough": cpu["ours"] / cpu["asgi"],
        "machine": machine(),
    }
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--port", type=int, default=21400)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as directory:
        print(json.dumps(run(Path(directory), asked.port, asked.check)))


if __name__ == "__main__":
    main()

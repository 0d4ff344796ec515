"""Measure the cost of a call in the gateway, beside other servers. Prints one JSON line.

    make bench-gateway                          all sides, a few minutes
    python -m benchmarks.gateway --check        few calls, no peers: whether the benchmark itself
                                                still works
    python -m benchmarks.gateway --strangers    only `strangers_...`: half a minute

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
    strangers_health_max_ms, strangers_call_max_ms, and `_p50_`    among 1,000 strangers that hold
                                    connections (`strangers`), each on a connection of its own
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from benchmarks.gateway.sides import Bench, Side
from benchmarks.gateway.strangers import among_strangers
from benchmarks.machine import machine, rounded


def body_of(stream: bool = False, chars: int = 4000) -> bytes:
    """Return a request of 4.5 KB: system prompt, two turns, a tool."""
    function = {"name": "lookup", "parameters": {"type": "object", "properties": {}}}
    request: dict[str, Any] = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "You are a careful agent. " * (chars // 50)},
            {"role": "user", "content": "What is the price of k374 plus 2? " * (chars // 70)},
        ],
        "temperature": 1.0,
        "max_tokens": 256,
        "tools": [{"type": "function", "function": function}],
    }
    return orjson.dumps(request | ({"stream": True} if stream else {}))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that the given share of the values lies below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cpu_rounds(sides: Sequence[Side], rounds: int, concurrency: int) -> dict[str, float]:
    """Return CPU microseconds a call of each side; the rounds alternate the sides."""
    body = body_of()
    for side in sides:  # warm-up: caches, connections, byte code
        side.drive(body, max(20, side.calls // 10), concurrency)
    for at in range(rounds):
        for side in sides if at % 2 == 0 else reversed(sides):
            side.cpu_us.append(1e6 * side.cpu_s_per_call(body, side.calls, concurrency))
    return {side.process.name: statistics.median(side.cpu_us) for side in sides}


def added_latency(
    engine: Side, sides: Sequence[Side], rounds: int, calls: int
) -> list[tuple[float, float]]:
    """Return the milliseconds that each side adds to the engine's latency at concurrency 1.

    Returns:
        Median and 99th percentile, each the median over the rounds.
    """
    body = body_of()
    found: list[list[list[float]]] = [[] for _ in sides]
    for _ in range(rounds):
        direct = engine.drive(body, calls, 1).latencies_s
        for side, added in zip(sides, found, strict=True):
            through = side.drive(body, calls, 1).latencies_s
            added.append(
                [1e3 * (percentile(through, q) - percentile(direct, q)) for q in (0.5, 0.99)]
            )
    return [
        (statistics.median(p50 for p50, _ in added), statistics.median(p99 for _, p99 in added))
        for added in found
    ]


def posts_per_call(engine: Side, side: Side, calls: int) -> float:
    """Return how many requests the engine gets for a call."""

    def asked() -> int:
        with urllib.request.urlopen(f"{engine.url}/asked", timeout=5) as reply:
            return int(reply.read())

    before = asked()
    side.drive(body_of(), calls, 8)
    return (asked() - before) / calls


def cpu_us_per_event(gateway: Side, rounds: int, calls: int, events: int) -> float:
    """Return CPU microseconds an event of a stream."""
    body = body_of(stream=True)
    gateway.drive(body, 20, 8)
    per_call = [gateway.cpu_s_per_call(body, calls, 32) for _ in range(rounds)]
    return 1e6 * statistics.median(per_call) / events


def rss_growth_pct(gateway: Side, count: int) -> float:
    """Return how much memory further waves of `count` streams at once add to the first, percent."""
    body = body_of(stream=True)
    gateway.drive(body, count, count)
    first = gateway.process.rss()
    for _ in range(3):
        gateway.drive(body, count, count)
    return 100.0 * (gateway.process.rss() - first) / first


def strangers_ms(bench: Bench, engine: Side, count: int, calls: int) -> dict[str, Any]:
    """Return the latencies among strangers, milliseconds."""
    gateway = bench.gateway("strangers", engine)
    gateway.drive(body_of(), 20, 4)
    health, call = among_strangers(gateway, body_of(), count, calls)
    return {
        "strangers": count,
        "strangers_health_p50_ms": 1e3 * statistics.median(health),
        "strangers_health_max_ms": 1e3 * max(health),
        "strangers_call_p50_ms": 1e3 * statistics.median(call),
        "strangers_call_max_ms": 1e3 * max(call),
    }


def run_strangers(directory: Path, port: int) -> dict[str, Any]:
    """Run one measurement."""
    with ExitStack() as stack:
        bench = Bench(stack, directory, port)
        found = strangers_ms(bench, bench.engine(), 1000, 300)
    return rounded({"benchmark": "gateway", **found, "machine": machine()})  # type: ignore[no-any-return]


def run(directory: Path, port: int, check: bool) -> dict[str, Any]:
    """Run all measurements."""
    scale, rounds, at_once = (0.02, 1, 50) if check else (1.0, 5, 1000)

    def calls(n: int) -> int:
        return max(30, int(n * scale))

    with ExitStack() as stack:
        bench = Bench(stack, directory, port)
        engine = bench.engine()
        slow = bench.engine("--pause-ms", "10")
        long = bench.engine("--prompt", "100000", "--response", "200")
        ours = bench.gateway("ours", engine, calls(4000))
        unconfirmed = bench.gateway("unconfirmed", engine, calls(2000), "gateway.acks=none")
        redaction = "gateway.redaction.enabled=true"
        sides = [
            ours,
            unconfirmed,
            bench.gateway("redaction", engine, calls(2000), redaction),
            bench.gateway("vllm", engine, calls(2000), kind="vllm"),
            bench.forwarder("asgi", engine, calls(4000)),
            bench.forwarder("fastapi", engine, calls(1000)),
        ]
        if not check:
            sides += [bench.litellm(engine, 200), bench.router(engine, calls(4000))]
        asked = posts_per_call(engine, ours, calls(400))
        cpu = cpu_rounds(sides, rounds, 32)
        acked, added = added_latency(engine, [ours, unconfirmed], rounds, calls(500))
        streaming = bench.gateway("streaming", slow)
        sse = cpu_us_per_event(streaming, rounds, calls(320), 101)
        growth = rss_growth_pct(streaming, at_once)
        heavy, prompt = bench.gateway("heavy", long), body_of(chars=400_000)
        heavy.drive(prompt, 2, 1)
        prompt_cpu_s = heavy.cpu_s_per_call(prompt, calls(50), 1)
        prompt_s = statistics.median(heavy.drive(prompt, calls(50), 1).latencies_s)
        among = strangers_ms(bench, engine, at_once, calls(300))
    return rounded(  # type: ignore[no-any-return]
        {
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
            "added_p50_ms": added[0],
            "added_p99_ms": added[1],
            "added_p50_ms_acked": acked[0],
            "added_p99_ms_acked": acked[1],
            "sse_cpu_us_per_event": sse,
            "streams_at_once": at_once,
            "streams_rss_growth_pct": growth,
            "long_prompt_ms": 1e3 * prompt_s,
            "long_prompt_cpu_ms": 1e3 * prompt_cpu_s,
            "ratio_to_passthrough": cpu["ours"] / cpu["asgi"],
            **among,
            "machine": machine(),
        }
    )


def main() -> None:
    """Run the benchmark and print its result as a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--strangers", action="store_true")
    parser.add_argument("--port", type=int, default=21400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as directory:
        found = (
            run_strangers(Path(directory), options.port)
            if options.strangers
            else run(Path(directory), options.port, options.check)
        )
        print(json.dumps(found))

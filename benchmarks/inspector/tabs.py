"""Measure what ten open live pages of the inspector cost the gateway and assemble.

Prints one JSON line.

    python -m benchmarks.inspector.tabs

The inspector runs all the time and follows Kafka; ten clients read `/live` in every other round.
CPU is that of the gateway's or the worker's process, user and system; a figure is the median over
the rounds. Fails if a page gets no event.

    gateway_cpu_us_per_call, assemble_cpu_us_per_step       without open pages
    gateway_ratio, assemble_ratio                           with ten pages to without
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gateway.benchmark import body_of
from benchmarks.gateway.sides import Bench as GatewayBench
from benchmarks.inspector.benchmark import Inspector, inspecting
from benchmarks.jobs.load import write
from benchmarks.jobs.sides import Bench, Size, feed_both
from benchmarks.machine import machine, rounded
from benchmarks.processes import free_port
from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.schemas.settings import Settings

TABS = 10


@contextmanager
def open_tabs(inspector: Inspector, count: int) -> Iterator[None]:
    """Keep live pages open; each must get more than its first event."""
    events, sockets = [0] * count, list[socket.socket]()
    key = {"authorization": f"Bearer {inspector.key}"}

    def read(at: int, connection: http.client.HTTPConnection) -> None:
        reply = connection.getresponse()
        with suppress(http.client.HTTPException, OSError):  # the page is closed
            while some := reply.read1(1 << 16):
                events[at] += some.count(b"event: live")

    threads = []
    for at in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", inspector.port)
        connection.request("GET", "/live", headers=key)
        sockets.append(connection.sock)
        threads.append(threading.Thread(target=read, args=(at, connection)))
        threads[-1].start()
    yield
    for open_socket in sockets:
        open_socket.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    if any(n < 2 for n in events):
        raise SystemExit(f"events of the open pages: {events}")


def alternated(rounds: int, measure: Callable[[int], float]) -> tuple[float, float]:
    """Return the median without open pages, and the ratio of the median with them to it."""
    found: dict[int, list[float]] = {0: [], TABS: []}
    for at in range(rounds):
        for tabs in (0, TABS) if at % 2 == 0 else (TABS, 0):
            found[tabs].append(measure(tabs))
    without = statistics.median(found[0])
    return without, statistics.median(found[TABS]) / without


def _on(directory: Path, servers: str) -> Settings:
    return Settings.model_validate(
        {"data_dir": str(directory), "kafka": {"bootstrap_servers": servers}}
    )


def part_gateway(directory: Path, port: int, rounds: int, calls: int) -> dict[str, float]:
    """Calls of 32 clients through a gateway."""
    with ExitStack() as stack:
        bench = GatewayBench(stack, directory, port)  # its Kafka is on the port after the first
        ours, body = bench.gateway("ours", bench.engine(), calls), body_of()
        ours.drive(body, 500, 32)
        settings = _on(directory / "inspector", f"127.0.0.1:{port + 1}")
        inspector = stack.enter_context(inspecting(settings, directory))

        def measure(tabs: int) -> float:
            with open_tabs(inspector, tabs):
                return 1e6 * ours.cpu_s_per_call(body, calls, 32)

        cpu, ratio = alternated(rounds, measure)
    return {"gateway_cpu_us_per_call": cpu, "gateway_ratio": ratio}


def part_jobs(directory: Path, port: int, rounds: int, steps: int) -> dict[str, float]:
    """Trajectories through a worker of assemble; each round has topics of its own."""
    with EmbeddedBroker(directory / "kafka-jobs", port) as broker:
        bench = Bench(directory, broker.bootstrap_servers, Size(steps, rounds, check=False))
        load = write(directory, bench.size.shape, bench.size.trajectories)

        def measure(tabs: int) -> float:
            with bench.installation(load) as here, ExitStack() as stack:
                settings = _on(directory / "inspector", broker.bootstrap_servers)
                prefix = here.settings.kafka.topic_prefix
                inspector = stack.enter_context(inspecting(settings, directory, prefix))
                worker = here.job("jobs assemble")
                here.until_logged(worker, "partition_taken_over", here.settings.kafka.partitions)
                stack.enter_context(open_tabs(inspector, tabs))
                before = worker.cpu_s()
                feed_both(here, load)
                return 1e6 * (worker.cpu_s() - before) / load.steps

        cpu, ratio = alternated(rounds, measure)
    return {"assemble_cpu_us_per_step": cpu, "assemble_ratio": ratio}


def main() -> None:
    """Run the benchmark and print its result as a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--only", choices=("gateway", "jobs"))
    asked = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "inspector_tabs", "tabs": TABS, "rounds": asked.rounds}
    with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as made:
        directory, port = Path(made), free_port()
        if asked.only != "jobs":
            result |= part_gateway(directory, port, asked.rounds, asked.calls)
        if asked.only != "gateway":
            result |= part_jobs(directory, port + 100, asked.rounds, asked.steps)
    print(json.dumps(rounded(result | {"machine": machine()})))


if __name__ == "__main__":
    main()

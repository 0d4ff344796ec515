"""Measure how long the pages of the inspector take on a lake of 100,000 trajectories.

Prints one JSON line.

    make bench-inspector                            100,000 trajectories, a few minutes at first
    python -m benchmarks.inspector --check          2,000 trajectories: tests the benchmark

The lake is written once, by the lake's own writer and maintenance, and kept in `.cache/`. Its
trajectories have one to three calls with texts of about 2 KB. `clawstream inspect` runs as a
process of its own without a broker; one client asks for one page after another, each page
`--requests` times with other trajectories, groups and words. Figures are milliseconds from the
request to the last byte of the page, at the median and the 95th percentile; `..._cpu_ms` is the
CPU time of the inspector for a page, which other work on the machine hardly changes.

    list, list_PAGE         the list without filters; with one filter; its second page
    text_common             full text: words of all trajectories; text_rare: of five, of one or of
                            none; text_random: beginnings of words; text_short: of one to three
                            letters; text_two: two words; text_phrase: a phrase of all
                            trajectories or of few; text_in_run, text_filtered: with other filters
    group, trajectory, tokens, record
                            these pages, of random trajectories; tokens_difference: by the
                            difference of engine and trainer
    operations, operations_series
                            the operations page, and the counts of its charts
    start_s                 seconds until the first page is served
    index_s                 seconds from there until all texts are indexed; index_cpu_s: CPU time of
                            the inspector in it, pages included
    indexing                pages without a search meanwhile, in turn
    rss_mb                  memory of the inspector at the end; rss_mb_start: before searches
    worst_p95_ms            the slowest of all pages, which should be below 300
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from benchmarks.gateway.benchmark import percentile
from benchmarks.inspector.lake import (
    ABSENT,
    COMMON,
    PROMPT,
    RARE,
    group_of,
    key_of,
    lake_of,
    run_of,
)
from benchmarks.machine import machine, rounded
from benchmarks.processes import Process, free_port, running
from clawstream.schemas.settings import Settings

CACHE = Path(".cache/bench")
MANY, FEW = 100_000, 2000
RANGES = ("1h", "24h", "30d")

INCOMPLETE = "The index of texts has"
"""Text of a list whose full text is not indexed yet."""


class Inspector(NamedTuple):
    """A running inspector. key: the API key that it printed."""

    process: Process
    port: int
    key: str

    def get(self, path: str) -> str:
        """Return a page. Ends the benchmark unless it is served."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET", path, headers={"authorization": f"Bearer {self.key}"})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        if reply.status != 200:
            raise SystemExit(f"{path}: {reply.status}\n{text[:2000]}")
        return text

    def milliseconds(self, path: str) -> float:
        """Return how long a page takes."""
        began = time.monotonic()
        self.get(path)
        return 1e3 * (time.monotonic() - began)


@contextmanager
def inspecting(
    settings: Settings, directory: Path, topic_prefix: str = "claw"
) -> Iterator[Inspector]:
    """Run `clawstream inspect` on the lake and the Kafka of settings; it answers from then on."""
    port, config = free_port(), directory / "inspector.yaml"
    kafka = {"bootstrap_servers": settings.bootstrap_servers, "topic_prefix": topic_prefix}
    config.write_text(json.dumps({"data_dir": str(settings.data_dir), "kafka": kafka}))
    command = [sys.executable, "-m", "clawstream", "inspect", "--config", str(config)]
    command += ["--port", str(port)]
    with running("inspector", command, directory / "inspector.log") as process:
        process.until_answers(f"http://127.0.0.1:{port}/login")
        found = re.search(r"key: (\S+)", process.log)
        assert found is not None, process.log
        yield Inspector(process, port, found[1])


Address = Callable[[random.Random], str]


def pages_of(trajectories: int) -> Mapping[str, Address]:
    """Return what makes an address of each page, by its name."""

    def listed(**query: Any) -> Address:
        return lambda r: (
            "/trajectories?"
            + urlencode(
                {name: value(r) if callable(value) else value for name, value in query.items()}
            )
        )

    def of_trajectory(end: str = "") -> Address:
        def address(r: random.Random) -> str:
            number = r.randrange(1, trajectories)
            return f"/t/{run_of(number)}/{key_of(number)}{end}"

        return address

    def group(r: random.Random) -> str:
        number = r.randrange(trajectories)
        return "/group?" + urlencode({"run": run_of(number), "id": group_of(number)})

    return {
        "list": listed(),
        "list_next": listed(before_at="2026-05-29T00:00:00", before_id="x"),
        "list_sorted": listed(sort=lambda r: r.choice(["-reward", "quality", "-tokens"])),
        "list_sorted_next": listed(sort="-reward", before_key=0.5,
                                   before_at="2026-05-29T00:00:00", before_id="x"),
        "list_run": listed(run_id="run-1"),
        "list_agent": listed(agent=lambda r: f"agent-{r.randrange(5)}"),
        "list_task": listed(task=lambda r: f'"task": {r.randrange(500)},'),
        "list_channel": listed(channel="val"),
        "list_group": listed(group_id=lambda r: group_of(r.randrange(trajectories))),
        "list_version": listed(version=lambda r: r.randrange(trajectories // 2000)),
        "list_reward": listed(reward_min=lambda r: r.random()),
        "list_quality": listed(quality_max=lambda r: r.random()),
        "list_status": listed(outcome="failed"),
        "list_admission": listed(stage=lambda r: r.choice(["admitted", "refused", "undecided"])),
        "list_reason": listed(reason="zero_variance"),
        "list_run_reward": listed(run_id="run-2", reward_min=0.5, stage="admitted"),
        "text_common": listed(text=lambda r: r.choice([COMMON, "tools", "products"])),
        "text_rare": listed(text=lambda r: r.choice([RARE, ABSENT, f"call-{r.randrange(9999)}-0"])),
        "text_random": listed(text=_word),
        "text_short": listed(text=lambda r: _word(r)[: r.randint(1, 3)]),
        "text_two": listed(text=lambda r: f"{r.choice([COMMON, _word(r)])} {_word(r)}"),
        "text_phrase": listed(text=lambda r: f'"{r.choice([PROMPT, "the needle is here"])}"'),
        "text_in_run": listed(run_id="run-3", text=_word),
        "text_filtered": listed(
            run_id="run-2", reward_min=0.5, stage="admitted", agent="agent-1",
            text=lambda r: r.choice([COMMON, _word(r)]),
        ),
        "group": group,
        "trajectory": of_trajectory(),
        "tokens": of_trajectory("/tokens?step=0"),
        "tokens_difference": of_trajectory("/tokens?step=0&by=difference"),
        "record": of_trajectory("/step/0"),
        "runs": lambda _: "/",
        "run": lambda r: f"/runs/run-{r.randrange(4)}",
        "operations": lambda r: f"/operations?range={r.choice(RANGES)}",
        "operations_series": lambda r: f"/operations/series.json?range={r.choice(RANGES)}&until="
        f"2026-05-29T10:{r.randrange(10, 60)}:{r.randrange(10, 60)}",
    }  # fmt: skip


def _word(r: random.Random) -> str:
    """Return the beginning of a word, as a person types it."""
    return "".join(r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(r.randint(2, 4)))


def run(directory: Path, trajectories: int, requests: int, only: str) -> dict[str, Any]:
    """Run all measurements."""
    settings, seed = lake_of(CACHE.absolute(), trajectories), random.Random(0)
    settings = settings.model_copy(
        update={"kafka": settings.kafka.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})}
    )
    began, found, result = time.monotonic(), dict[str, float](), dict[str, Any]()
    with inspecting(settings, directory) as inspector:
        inspector.get("/trajectories")
        result["start_s"] = time.monotonic() - began
        cpu_s = inspector.process.cpu_s()
        times = list(_while_indexing(inspector, pages_of(trajectories), seed))
        result["index_s"] = time.monotonic() - began - result["start_s"]
        result["index_cpu_s"] = inspector.process.cpu_s() - cpu_s
        found |= _percentiles("indexing", times)
        result["rss_mb_start"] = inspector.process.rss() / 1e6
        for name, address in pages_of(trajectories).items():
            if not re.search(only, name):
                continue
            cpu_s = inspector.process.cpu_s()
            times = [inspector.milliseconds(address(seed)) for _ in range(requests)]
            found |= _percentiles(name, times)
            found[f"{name}_cpu_ms"] = 1e3 * (inspector.process.cpu_s() - cpu_s) / requests
        result["long_trajectory_ms"] = inspector.milliseconds(f"/t/{run_of(0)}/{key_of(0)}")
        result["rss_mb"] = inspector.process.rss() / 1e6
    worst = max((ms for name, ms in found.items() if name.endswith("p95_ms")), default=None)
    return rounded(  # type: ignore[no-any-return]
        {
            "benchmark": "inspector", "trajectories": trajectories, "requests": requests,
            **result, **found, "worst_p95_ms": worst, "machine": machine(),
        }
    )  # fmt: skip


def _while_indexing(
    inspector: Inspector, pages: Mapping[str, Address], seed: random.Random
) -> Iterator[float]:
    """Yield the times of pages without a search until all texts are indexed; at least one."""
    others = [address for name, address in pages.items() if not name.startswith("text")]
    for address in cycle(others):
        yield inspector.milliseconds(address(seed))
        if INCOMPLETE not in inspector.get(f"/trajectories?text={ABSENT}"):
            return


def _percentiles(name: str, times: list[float]) -> dict[str, float]:
    p50, p95 = percentile(times, 0.5), percentile(times, 0.95)
    print(f"{name}: {p50:.0f} {p95:.0f} ms", file=sys.stderr)
    return {f"{name}_p50_ms": p50, f"{name}_p95_ms": p95}


def main() -> None:
    """Run the benchmark and print its result as a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="few trajectories and requests")
    parser.add_argument("--trajectories", type=int)
    parser.add_argument("--requests", type=int, help="of each page")
    parser.add_argument("--only", default="", help="pages whose name has this pattern")
    asked = parser.parse_args()
    trajectories = asked.trajectories or (FEW if asked.check else MANY)
    requests = asked.requests or (3 if asked.check else 40)
    with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as directory:
        print(json.dumps(run(Path(directory), trajectories, requests, asked.only)))


if __name__ == "__main__":
    main()

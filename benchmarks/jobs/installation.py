"""One installation of Clawstream on the Kafka of `benchmarks.jobs`: its topics, its processes, what
they cost and what they put out.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.gateway.benchmark import running
from benchmarks.jobs.load import GROUP_SIZE, RULE, RUN, Load
from runtime.kafka import Record
from runtime.process.child import die_with_parent
from runtime.topics.records import cluster_of, create_topics
from schemas.codec.single_object import Codec
from schemas.settings import Settings

READY_S, DONE_S = 180.0, 1200.0
LOG_TAIL = 3000


def free_port() -> int:
    """A port that is free together with the one after it.

    Below 32768: above it the kernel hands out ports to clients.
    """
    for port in range(22000, 32000, 10):
        try:
            for p in (port, port + 1):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", p))
        except OSError:
            continue
        return port
    raise SystemExit("no free port between 22000 and 32000")


class Process:
    """A process of the installation, as the command line starts it."""

    def __init__(self, name: str, process: psutil.Process, log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def cpu_s(self) -> float:
        """CPU seconds so far: user and system, all threads, children that have ended and that have
        not.
        """
        times = [p.cpu_times() for p in (self._process, *self._process.children(recursive=True))]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    def rss(self) -> int:
        """Resident bytes."""
        return int(self._process.memory_info().rss)

    def check(self) -> None:
        """Ends the benchmark when it has died."""
        if not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit(f"{self.name} died; its log ends:\n{self.log[-LOG_TAIL:]}")


class Installation:
    """Topics under a prefix of their own, a data directory, one run.

    Everything is gone after `with`.
    """

    def __init__(
        self, directory: Path, bootstrap_servers: str, prefix: str, load: Load, **jobs: Any
    ) -> None:
        groups = load.groups
        batch_groups = max(n for n in range(1, 17) if groups % n == 0)
        self._directory = directory / prefix
        self._given = {
            "run_id": RUN,
            "data_dir": str(self._directory),
            "kafka": {"bootstrap_servers": bootstrap_servers, "topic_prefix": prefix},
            "jobs": {"reward_functions": {RUN: [f"{RULE}@1"]}, **jobs},
            "admit": {
                "policy": {
                    "group_size": GROUP_SIZE,
                    "required_rewards": [f"rule/{RULE}"],
                    "batch_groups": batch_groups,
                }
            },
        }
        self.settings = Settings.model_validate(self._given)
        self.topics, self.cluster = self.settings.kafka.topics, cluster_of(self.settings)
        self.processes: list[Process] = []
        self._stack, self._codec = ExitStack(), Codec()

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True)
        (self._directory / "settings.yaml").write_text(json.dumps(self._given))
        create_topics(self.cluster, self.settings)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        prefix = f"{self.settings.kafka.topic_prefix}."
        for topic in [t for t in self.cluster.topics() if t.startswith(prefix)]:
            self.cluster.delete_topic(topic)
        shutil.rmtree(self._directory)

    # -- processes

    def start(self, name: str, module: str, *words: str) -> Process:
        """Start `python -m module words` with the installation's settings."""
        log = self._directory / f"{name}.log"
        config = ["--config", str(self._directory / "settings.yaml")]
        process = self._stack.enter_context(
            running([sys.executable, "-m", *module.split(), *config, *words], log)
        )
        self.processes.append(Process(name, process, log))
        return self.processes[-1]

    def job(self, command: str, worker: str = "0") -> Process:
        """Start `clawstream <command>`, a worker of that name."""
        return self.start(
            f"{command.split()[-1]}-{worker}",
            f"clawstream {command}",
            f"jobs.worker_id={json.dumps(worker)}",
        )

    def until(
        self,
        what: str,
        condition: Callable[[], bool],
        seconds: float = DONE_S,
        pause_s: float = 0.2,
    ) -> None:
        """Wait for something. Ends the benchmark when it does not come, or when a process dies."""
        deadline = time.monotonic() + seconds
        while not condition():
            for process in self.processes:
                process.check()
            if time.monotonic() > deadline:
                logs = "\n".join(f"-- {p.name}:\n{p.log[-LOG_TAIL:]}" for p in self.processes)
                raise SystemExit(f"not within {seconds:g} s: {what}\n{logs}")
            time.sleep(pause_s)

    def until_logged(self, process: Process, words: str, times: int = 1) -> None:
        """Wait until the process has said something so often."""
        self.until(
            f"{process.name} says {words!r}", lambda: process.log.count(words) >= times, READY_S
        )

    # -- records

    def feed(self, file: Path) -> None:
        """Put a file on its topics, from another process: what that costs is nobody's."""
        servers = self.settings.bootstrap_servers
        command = [
            sys.executable,
            "-m",
            "benchmarks.jobs.feeder",
            str(file),
            servers,
            self.settings.kafka.topic_prefix,
        ]
        subprocess.run(die_with_parent(command), check=True)

    def ends(self, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        """(topic, partition) to its end."""
        return {(t, p): high for t in topics for p, (_, high) in self.cluster.watermarks(t).items()}

    def read_to(self, group: str, ends: dict[tuple[str, int], int]) -> bool:
        """Whether a group has committed all of these."""
        done = self.cluster.committed(group)
        return all(done.get(place, 0) >= end for place, end in ends.items() if end)


class Watch:
    """Reads a topic as it grows, and counts."""

    def __init__(self, installation: Installation, topic: str, *kinds: type) -> None:
        self._codec, self._kinds = Codec(), {k.__name__ for k in kinds}
        count = installation.cluster.topics(topic)[topic]
        self._reader = installation.cluster.reader(
            "bench-watch", {(topic, p): 0 for p in range(count)}
        )
        self.count = 0

    def new(self) -> list[tuple[Record, Any]]:
        """What has come since, of the kinds, to the end that the topic has now."""
        found: list[tuple[Record, Any]] = []
        while (records := self._reader.poll(2000, 0.05)) or not self._reader.at_end:
            mine = (
                r
                for r in records
                if r.value is not None and self._codec.type_name(r.value) in self._kinds
            )
            found += [(r, self._codec.decode(r.value)) for r in mine]
        self.count += len(found)
        return found

    def counted(self, count: int) -> bool:
        """Whether so many have come by now."""
        self.new()
        return self.count >= count

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

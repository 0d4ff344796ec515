"""One installation of Clawstream on the Kafka of `benchmarks.jobs`: topics, processes, records."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from benchmarks.jobs.load import GROUP_SIZE, RULE, RUN, Load
from benchmarks.processes import LOG_TAIL, Process, running
from clawstream.runtime.kafka import Record
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.topics.records import cluster_of, create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

READY_S, DONE_S = 180.0, 1200.0


class Installation:
    """Topics under their own prefix, a data directory, one run; all are deleted after `with`."""

    def __init__(
        self,
        directory: Path,
        bootstrap_servers: str,
        prefix: str,
        load: Load,
        lake: Mapping[str, Any],
        **jobs: Any,
    ) -> None:
        self._directory = directory / prefix
        policy = {
            "group_size": GROUP_SIZE,
            "required_rewards": [f"rule/{RULE}"],
            "batch_groups": max(n for n in range(1, 17) if load.groups % n == 0),
        }
        self._given = {
            "run_id": RUN,
            "data_dir": str(self._directory),
            "kafka": {"bootstrap_servers": bootstrap_servers, "topic_prefix": prefix},
            "jobs": {"reward_functions": {RUN: [f"{RULE}@1"]}, **jobs},
            "admit": {"policy": policy},
            "lake": dict(lake),
        }
        self.settings = Settings.model_validate(self._given)
        self.topics, self.cluster = self.settings.kafka.topics, cluster_of(self.settings)
        self.processes: list[Process] = []
        self._stack = ExitStack()

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
        command = [sys.executable, "-m", *module.split(), *config, *words]
        self.processes.append(self._stack.enter_context(running(name, command, log)))
        return self.processes[-1]

    def job(self, command: str, worker: str = "0") -> Process:
        """Start `clawstream <command>`, a worker of that name."""
        name, word = f"{command.split()[-1]}-{worker}", f"jobs.worker_id={json.dumps(worker)}"
        return self.start(name, f"clawstream {command}", word)

    def until(self, what: str, condition: Callable[[], bool], seconds: float = DONE_S) -> None:
        """Wait for a condition. Ends the benchmark at a time-out or when a process dies."""
        deadline = time.monotonic() + seconds
        while not condition():
            for process in self.processes:
                process.check()
            if time.monotonic() > deadline:
                logs = "\n".join(f"-- {p.name}:\n{p.log[-LOG_TAIL:]}" for p in self.processes)
                raise SystemExit(f"not within {seconds:g} s: {what}\n{logs}")
            time.sleep(0.2)

    def until_logged(self, process: Process, words: str, times: int = 1) -> None:
        """Wait until the log of the process has these words so many times."""
        what = f"{process.name} logs {words!r}"
        self.until(what, lambda: process.log.count(words) >= times, READY_S)

    # -- records

    def feed(self, file: Path) -> None:
        """Write a file to its topics, in a process whose CPU is not measured."""
        words = (str(file), self.settings.bootstrap_servers, self.settings.kafka.topic_prefix)
        command = [sys.executable, "-m", "benchmarks.jobs.feeder", *words]
        subprocess.run(die_with_parent(command), check=True)

    def ends(self, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        """Return (topic, partition) to its end."""
        return {(t, p): high for t in topics for p, (_, high) in self.cluster.watermarks(t).items()}

    def records(self, topic: str, *kinds: type) -> list[tuple[Record, Any]]:
        """Return all records of these types on a topic."""
        watch = Watch(self, topic, *kinds)
        found = watch.new()
        watch.close()
        return found

    def read_to(self, group: str, ends: dict[tuple[str, int], int]) -> bool:
        """Return whether a group has committed all of these offsets."""
        done = self.cluster.committed(group)
        return all(done.get(place, 0) >= end for place, end in ends.items() if end)


class Watch:
    """Reads a topic as it grows, and counts records of some types."""

    def __init__(self, installation: Installation, topic: str, *kinds: type) -> None:
        self._codec, self._kinds = Codec(), {k.__name__ for k in kinds}
        count = installation.cluster.topics(topic)[topic]
        self._reader = installation.cluster.reader(
            "bench-watch", {(topic, p): 0 for p in range(count)}
        )
        self.count = 0

    def new(self) -> list[tuple[Record, Any]]:
        """Return the records of these types since the last call, up to the current end."""
        found: list[tuple[Record, Any]] = []
        while (records := self._reader.poll(2000, 0.05)) or not self._reader.at_end:
            found += [
                (r, self._codec.decode(r.value))
                for r in records
                if r.value is not None and self._codec.type_name(r.value) in self._kinds
            ]
        self.count += len(found)
        return found

    def counted(self, count: int) -> bool:
        """Read on; return whether at least `count` records have come."""
        self.new()
        return self.count >= count

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

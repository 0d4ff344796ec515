"""Questions to a Kafka that does not answer: they fail in time, and end no process.

librdkafka's admin client has questions that end the process when their time-out passes. So the
questions are asked in a child process, on a broker of its own that is stopped and continued.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.ports import free_port
from support.processes import ROOT, freeze

from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.runtime.kafka import Cluster

ASKER = """
import sys, threading
from confluent_kafka import KafkaException
from clawstream.runtime.kafka import Cluster, Unavailable

servers, timeout_s, threads = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
cluster = Cluster(servers)

def asked(answers):
    try:
        found = cluster.commits("group", timeout_s)
        answers.append(sorted((t, p, c.offset, c.metadata) for (t, p), c in found.items()))
    except Unavailable:
        answers.append("away")
    try:
        if "group" not in cluster.groups(timeout_s):
            answers.append("no group")
    except Unavailable:
        answers.append("away")

for line in sys.stdin:
    answers = []
    for _ in range(int(line)):
        asking = [threading.Thread(target=asked, args=[answers]) for _ in range(threads)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    print(*{str(answer) for answer in answers}, sep="; ", flush=True)
"""
TOLD = str([("topic", 0, 3, ""), ("topic", 2, 1, "")])


class Asker:
    """A process that asks for the offsets of a group."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, times: int) -> str:
        """Return the different answers to some questions, one after the other."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{times}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer, f"the process ended with {self.process.wait()}"
        return answer


@contextmanager
def asker(servers: str, timeout_s: float, threads: int) -> Iterator[Asker]:
    command = [sys.executable, "-c", ASKER, servers, str(timeout_s), str(threads)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Asker(process)
        finally:
            process.kill()


def test_the_offsets_of_a_group_are_asked_of_a_frozen_kafka(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, free_port()) as broker:
        cluster = Cluster(broker.bootstrap_servers)
        cluster.create_topic("topic", 4, {})
        reader = cluster.reader("group", {})
        reader.commit({("topic", 0): 3, ("topic", 2): 1})
        reader.close()
        pid = broker.pid
        assert pid is not None
        with (
            asker(broker.bootstrap_servers, 0.2, 4) as short,
            asker(broker.bootstrap_servers, 30.0, 1) as patient,
        ):
            for _ in range(6):
                assert patient.ask(1) == TOLD
                short.ask(1)
                freeze(pid)
                assert short.ask(4) == "away"
                os.kill(pid, signal.SIGCONT)
                short.ask(2)
            assert patient.ask(3) == TOLD

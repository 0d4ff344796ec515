"""The embedded broker with real JVMs, files and kill -9.

Each test has its own data directory and ports.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType
from support.patience import until
from support.ports import free_port
from support.processes import freeze

from clawstream.runtime.broker import embedded as broker_cli
from clawstream.runtime.broker.embedded import BrokerError, EmbeddedBroker, NodeStatus
from clawstream.runtime.broker.jars import PinnedJar, ensure_jars, find_java
from clawstream.runtime.process.ports import PortTaken


def create_topic(servers: str, name: str, partitions: int = 1) -> None:
    # Named, because its futures fail after garbage collection.
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(name, partitions)]).values():
        future.result(90)


def read_all(servers: str, topic: str, partitions: int = 1) -> list[int]:
    """Return the number of every record from the start to the current end of the topic."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "reader", "enable.auto.commit": False}
    )
    ends = {
        p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=90)[1]
        for p in range(partitions)
    }
    consumer.assign([TopicPartition(topic, p, 0) for p, end in ends.items() if end])
    numbers: list[int] = []
    while len(numbers) < sum(ends.values()):
        message = consumer.poll(90)
        assert message is not None and message.error() is None
        value = message.value()
        assert value is not None
        numbers.append(int(value))
    consumer.close()
    return numbers


class SteadyProducer:
    """Produce numbers in the background and record the acknowledged ones.

    The producer uses acks=all and idempotence.
    """

    def __init__(self, servers: str, topic: str) -> None:
        self.acknowledged: list[int] = []
        self.failed: list[str] = []
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "acks": "all",
                # while the broker is down, the client would log many lines per second
                "log_level": 0,
                "reconnect.backoff.max.ms": 500,
            }
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.002):
            self._producer.produce(
                self._topic, str(number).encode(), key=str(number), on_delivery=self._delivered
            )
            self._producer.poll(0)
            number += 1
        self._producer.flush(300)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.acknowledged.append(int(message.value() or b""))
        else:
            self.failed.append(str(error))

    def __enter__(self) -> "SteadyProducer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def await_more(self, count: int) -> None:
        goal = len(self.acknowledged) + count
        until(lambda: len(self.acknowledged) >= goal, f"{count} more acknowledged records")


def test_acknowledged_records_survive_kill_and_restart(tmp_path: Path) -> None:
    port = free_port()
    broker = EmbeddedBroker(tmp_path / "broker", port)
    broker.start()
    try:
        create_topic(broker.bootstrap_servers, "numbers")
        rss_mb = psutil.Process(broker.pid).memory_info().rss >> 20
        with pytest.raises(BrokerError, match=f"already runs on .*pid {broker.pid}"):
            EmbeddedBroker(tmp_path / "broker", port).start()
        with SteadyProducer(broker.bootstrap_servers, "numbers") as producer:
            producer.await_more(300)
            broker.kill()
            assert (broker.pid, broker.exit_code) == (None, 128 + signal.SIGKILL)
            broker.restart()
            producer.await_more(300)
        broker.kill()
    finally:
        broker.stop()
    # After a kill -9, the pid file names a process that has ended, or another process that reuses
    # the pid.
    (tmp_path / "broker" / "node-1" / "broker.pid").write_text(f"{os.getpid()}\n")
    with EmbeddedBroker(tmp_path / "broker", port) as second:
        found = read_all(second.bootstrap_servers, "numbers")
    assert producer.failed == []
    assert set(producer.acknowledged) <= set(found)
    assert len(found) == len(set(found))
    assert rss_mb < 512
    assert not (tmp_path / "broker" / "node-1" / "broker.pid").exists()


def test_a_node_on_each_of_three_hosts_is_one_cluster(tmp_path: Path) -> None:
    """The hosts are three addresses of this machine, each with a data directory of its own."""
    hosts, port = ("127.0.0.1", "127.0.0.2", "127.0.0.3"), free_port(nodes=3)
    brokers = [
        EmbeddedBroker(tmp_path / host, port, 256, advertised_host=host, hosts=hosts)
        for host in hosts
    ]
    servers = ",".join(broker.bootstrap_servers for broker in brokers)
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as pool:
        for broker in brokers:
            stack.callback(broker.stop)
        for started in [pool.submit(broker.start, patience_s=180) for broker in brokers]:
            started.result()
        create_topic(servers, "numbers", partitions=6)
        with SteadyProducer(servers, "numbers") as producer:
            producer.await_more(300)
            brokers[0].kill()
            producer.await_more(600)
            brokers[0].restart()
            producer.await_more(300)
        numbers = read_all(servers, "numbers", partitions=6)
        second = broker_cli.status(tmp_path / hosts[1])
        assert second == NodeStatus(2, port + 10, brokers[1].pid, ready=True)
        # The client is created only now, because one of the three nodes may learn of a topic late.
        admin = AdminClient({"bootstrap.servers": servers})
        (described,) = admin.describe_configs(
            [ConfigResource(ResourceType.TOPIC, "numbers")]
        ).values()
        assert described.result(90)["min.insync.replicas"].value == "2"
    assert producer.failed == []
    assert sorted(numbers) == sorted(producer.acknowledged)
    with pytest.raises(BrokerError, match=r"holds a cluster of 3 node\(s\), asked for 1"):
        EmbeddedBroker(tmp_path / hosts[0], free_port()).start()


@pytest.mark.long
def test_a_start_uses_the_archive_of_classes_unless_it_is_bad(tmp_path: Path) -> None:
    def copied(jar: PinnedJar, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(ensure_jars() / jar.name, directory))

    jars = ensure_jars(tmp_path / "jars", fetch=copied)  # none of them has an archive yet

    def mapped() -> bool:
        with EmbeddedBroker(tmp_path / "broker", free_port(), jars_dir=jars) as broker:
            maps = Path(f"/proc/{broker.pid}/maps").read_text()
            return any(str(path) in maps for path in jars.glob("classes-*.jsa"))

    assert [mapped(), mapped()] == [False, True]
    (archive,) = jars.glob("classes-*.jsa")
    content = bytearray(archive.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 65536] = bytes(65536)
    archive.unlink()
    archive.write_bytes(content)
    assert not mapped()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    port = free_port()
    for taken in (port, port + 1):
        with socket.socket() as other:
            other.bind(("127.0.0.1", taken))
            other.listen()
            with pytest.raises(PortTaken, match=rf":{taken}: .*broker\.port"):
                EmbeddedBroker(tmp_path, port).start()
    assert broker_cli.status(tmp_path) is None


def test_a_start_that_fails_shows_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"exited with 1:(.|\n)*heap"):
        EmbeddedBroker(tmp_path, free_port(), heap_mb=0).start()
    node = broker_cli.status(tmp_path)
    assert node is not None and node.pid is None


PROGRAM = """
import sys
from pathlib import Path
from clawstream.runtime.broker.foreground import run_foreground
from clawstream.schemas.settings import BrokerSettings
settings = BrokerSettings(port=int(sys.argv[2]), heap_mb=256, java=sys.argv[3] or None)
sys.exit(run_foreground(settings, Path(sys.argv[1])))
"""


@contextmanager
def program(data_dir: Path, port: int, java: str = "") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(data_dir), str(port), java])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def running_pid(data_dir: Path) -> int:
    """Return the pid of the broker on `data_dir` as soon as it serves."""

    def serving() -> bool:
        node = broker_cli.status(data_dir)
        return node is not None and node.ready

    until(serving, "a broker that serves")
    return started_pid(data_dir)


def started_pid(data_dir: Path) -> int:
    """Return the pid of the broker on `data_dir` as soon as it runs."""

    def runs() -> bool:
        node = broker_cli.status(data_dir)
        return node is not None and node.pid is not None

    until(runs, "its JVM")
    node = broker_cli.status(data_dir)
    assert node is not None and node.pid is not None
    return node.pid


def test_in_the_foreground_it_ends_as_its_jvm_does_and_never_outlives_its_parent(
    tmp_path: Path,
) -> None:
    port = free_port()
    with program(tmp_path, port) as supervised:
        pid = running_pid(tmp_path)
        os.kill(pid, signal.SIGKILL)
        assert supervised.wait(240) == 128 + signal.SIGKILL
    # This Java reports its version once: a serving broker does not depend on a second check.
    once = tmp_path / "java"
    names = 'case "$*" in *XshowSettings*) mkdir "$0.asked" || exit 1 ;; esac'
    once.write_text(f'#!/bin/sh\n{names}\nexec "{find_java().executable}" "$@"\n')
    once.chmod(0o755)
    with program(tmp_path, port, java=str(once)) as supervised:
        pid = running_pid(tmp_path)
        supervised.send_signal(signal.SIGTERM)
        assert supervised.wait(240) == 0
        assert not psutil.pid_exists(pid)
    with program(tmp_path, port) as supervised:
        pid = running_pid(tmp_path)
        supervised.kill()
        until(lambda: not psutil.pid_exists(pid), "the JVM dies with its parent")


@pytest.mark.long
def test_it_may_take_any_time_to_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Recovery after an unclean stop takes time in proportion to the logs.

    A supervisor that stops the broker meanwhile never sees the end of the recovery.
    """
    with program(tmp_path, free_port()) as starter:
        pid = started_pid(tmp_path)
        freeze(pid)
        time.sleep(broker_cli.READY_TIMEOUT_S + 5)
        os.kill(pid, signal.SIGCONT)
        assert running_pid(tmp_path) == pid
        starter.send_signal(signal.SIGTERM)
        assert starter.wait(240) == 0
    assert "node 1 starts" in capfd.readouterr().out


def test_a_start_with_a_bound_gives_up_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"not ready after 0 s: node 1 starts"):
        EmbeddedBroker(tmp_path, free_port()).start(patience_s=0.0)
    node = broker_cli.status(tmp_path)
    assert node is not None and node.pid is None

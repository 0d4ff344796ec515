"""The embedded broker: Apache Kafka (KRaft) on this machine, without Docker or an installed Java.

`EmbeddedBroker` runs one node below one data directory:

    cluster.json                 cluster id, number of nodes, port of the last start
    node-1/records/              Kafka's own data; present means formatted
    node-1/server.properties     written at each start; also identifies the process
    node-1/broker.{log,out,pid}

Clients connect to `port`, the controllers of other nodes to the next one. Node n of several, each
on a host of its own, has the ports from `port` + 10 * (n - 1). `foreground.py` runs a broker under
a supervisor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from clawstream.runtime.broker import node_config as config
from clawstream.runtime.broker.class_archive import make_base_archive
from clawstream.runtime.broker.data_dir import (
    claim_directory,
    format_new,
    known_plan,
    last_lines,
    one_starter,
    under_way,
    write_node,
)
from clawstream.runtime.broker.jars import Java, ensure_jars, find_java
from clawstream.runtime.broker.jvm import BrokerError, Jvm, JvmDied, NotReady, read_pid
from clawstream.runtime.broker.node_config import NodePlan
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.ports import check_free
from clawstream.schemas.settings import BrokerSettings

__all__ = ["BrokerError", "EmbeddedBroker", "NodeStatus", "broker_of", "status"]

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
"""Within the 20 s that a supervisor waits. The first stop also writes the archive of classes."""
_ASK_S = 1.0
_POLL_S = 0.05
_PROGRESS_EVERY_S = 10.0
Report = Callable[[str], None]


@dataclass(frozen=True)
class NodeStatus:
    """The node of a data directory. `pid` None: not running. `ready`: it serves clients."""

    node: int
    port: int
    pid: int | None
    ready: bool


class EmbeddedBroker:
    """A Kafka cluster of one node, or the node of this machine if `hosts` are several.

    Every error is a BrokerError, JarsError, JavaError or PortTaken. The JVM dies with this process.
    `advertised_host` is the name under which clients reach the broker; any name but loopback makes
    the broker listen on all interfaces (as a container needs).
    """

    def __init__(
        self,
        data_dir: Path,
        port: int = 19092,
        heap_mb: int = 300,
        java: str | None = None,
        jars_dir: Path | None = None,
        *,
        advertised_host: str = config.LOOPBACK,
        hosts: tuple[str, ...] = (),
    ) -> None:
        if "," in str(data_dir):
            raise BrokerError(
                f"data directory {data_dir} has a comma in its name, which Kafka reads as two "
                "directories"
            )
        if hosts and advertised_host not in hosts:
            raise BrokerError(
                f"broker.advertised_host={advertised_host} is none of broker.hosts, "
                f"{', '.join(hosts)}: set it to the name of this machine among them"
            )
        self.data_dir = data_dir.expanduser().absolute()
        self.plan = config.plan_node(self.data_dir, port, advertised_host, hosts)
        self._heap_mb = heap_mb
        self._java_setting = java
        self._jars_setting = jars_dir
        self._jvm: Jvm | None = None
        self._cluster_id = ""

    @property
    def bootstrap_servers(self) -> str:
        return f"{self.plan.advertised_host}:{self.plan.port}"

    @property
    def pid(self) -> int | None:
        """Of the JVM that this object started; None if it does not run."""
        return None if self._jvm is None or self._jvm.exit_code is not None else self._jvm.pid

    @property
    def exit_code(self) -> int | None:
        """Of the JVM, 128 + signal number if it was killed; None while it runs."""
        return None if self._jvm is None else self._jvm.exit_code

    def start(self, *, patience_s: float = READY_TIMEOUT_S, report: Report | None = None) -> None:
        """Format a new data directory, start the node, and return when it serves clients.

        On failure the node does not keep running.

        Args:
            patience_s: Longest wait for another start to end and for the node to serve, in
                seconds. Fetching jars and formatting come on top.
            report: Called with a progress message every 10 s.

        Raises:
            PortTaken: Another process has a port.
            BrokerError: The directory's broker already runs (with its pid), the node ends (with the
                end of its log), or `patience_s` pass.
        """
        plan = self.plan
        self.data_dir.mkdir(parents=True, exist_ok=True)
        asked = time.monotonic()
        with one_starter(self.data_dir, patience_s, report):
            patience_s = max(0.0, patience_s - (time.monotonic() - asked))
            self._check_not_running()
            java, jars = self._java_and_jars(patience_s, report)
            name = f"broker node {plan.node}"
            check_free(config.LOOPBACK, plan.port, name, "broker.port")
            check_free(
                config.LOOPBACK, plan.controller_port, f"the controller of {name}", "broker.port"
            )
            self._cluster_id = claim_directory(self.data_dir, plan)
            format_new(plan, java, jars, self._cluster_id)
            self._launch(java, jars)
            try:
                self._await_ready(patience_s, report)
            except BaseException:  # also when it is interrupted
                self.stop()
                raise

    def kill(self) -> None:
        """SIGKILL the node and wait until it is gone."""
        self._started().end(patience_s=0.0)

    def restart(self) -> None:
        """Stop the node if it runs, start it on its data, return when it serves clients again.

        Its copies may still be catching up with those of the other nodes then.
        """
        self._started().end(STOP_TIMEOUT_S)
        with one_starter(self.data_dir, READY_TIMEOUT_S):
            self._launch(*self._java_and_jars(READY_TIMEOUT_S))
            self._await_ready(READY_TIMEOUT_S)

    def stop(self) -> None:
        """SIGTERM the node, SIGKILL it after STOP_TIMEOUT_S. Nothing to stop is fine."""
        if self._jvm is not None:
            self._jvm.end(STOP_TIMEOUT_S)
            self.plan.pid_file.unlink(missing_ok=True)
            self._jvm = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _started(self) -> Jvm:
        if self._jvm is None:
            raise BrokerError(f"{self.data_dir} was not started by this EmbeddedBroker")
        return self._jvm

    def _check_not_running(self) -> None:
        pid = read_pid(self.plan)
        if pid is not None:
            raise BrokerError(
                f"a broker already runs on {self.data_dir}: pid {pid}. Use it, stop it, or choose "
                "another data directory"
            )
        self.plan.pid_file.unlink(missing_ok=True)

    def _java_and_jars(self, patience_s: float, report: Report | None = None) -> tuple[Java, Path]:
        jars = ensure_jars(self._jars_setting, patience_s=patience_s, report=report)
        java = find_java(self._java_setting)
        if self._java_setting is None:
            make_base_archive(java)
        return java, jars

    def _launch(self, java: Java, jars: Path) -> None:
        plan = self.plan
        self._jvm = Jvm(write_node(plan, java, jars, self._heap_mb), plan.output)
        plan.pid_file.write_text(f"{self._jvm.pid}\n", encoding="ascii")

    def _await_ready(self, patience_s: float, report: Report | None = None) -> None:
        """Wait until the node itself says that it serves, in the cluster of this directory."""
        plan, cluster = self.plan, _cluster_at(self.plan)
        started = reported = time.monotonic()
        while True:
            view = cluster.view(_ASK_S)
            if (
                view is not None
                and view.cluster_id == self._cluster_id
                and plan.node in view.brokers
            ):
                return
            if (code := self.exit_code) is not None:
                raise JvmDied(
                    f"broker node {plan.node} exited with {code}:\n{last_lines(plan)}", code
                )
            now = time.monotonic()
            if now - started > patience_s:
                raise NotReady(
                    f"the broker on port {plan.port} is not ready after {patience_s:.0f} s: "
                    f"{under_way(plan)}. "
                    f"With more patience it would have gone on:\n{last_lines(plan)}"
                )
            if report is not None and now - reported >= _PROGRESS_EVERY_S:
                reported = now
                report(
                    f"the broker on port {plan.port} is not ready after {now - started:.0f} s: "
                    f"{under_way(plan)}"
                )
            time.sleep(_POLL_S)


def status(data_dir: Path) -> NodeStatus | None:
    """The node of `data_dir`; None if no broker was ever started there."""
    plan = known_plan(data_dir)
    if plan is None:
        return None
    pid = read_pid(plan)
    view = _cluster_at(plan).view(_ASK_S) if pid is not None else None
    return NodeStatus(
        plan.node, plan.port, pid, ready=view is not None and plan.node in view.brokers
    )


def _cluster_at(plan: NodePlan) -> Cluster:
    """Return the cluster as the node sees it; the client tries again soon while the node starts."""
    options = {"reconnect.backoff.ms": "20", "reconnect.backoff.max.ms": "100"}
    return Cluster(f"{config.LOOPBACK}:{plan.port}", options)


def broker_of(settings: BrokerSettings, data_dir: Path) -> EmbeddedBroker:
    """Return the broker that the settings describe; it is not started."""
    return EmbeddedBroker(
        data_dir,
        settings.port,
        settings.heap_mb,
        settings.java,
        settings.jars_dir,
        advertised_host=settings.advertised_host,
        hosts=settings.hosts,
    )

"""The embedded broker: Apache Kafka (KRaft) on this machine, without Docker or an installed Java.

`EmbeddedBroker` runs one node, or several that replicate to each other, below one data directory:

    cluster.json                 cluster id, number of nodes, port of the last start
    node-1/records/              Kafka's own data; present means formatted
    node-1/server.properties     written at each start; also identifies the process
    node-1/broker.{log,out,pid}

Clients connect to `port` (node n: port + 10 * (n - 1)). Each node's controller listens on the next
port. `foreground.py` runs a broker under a supervisor.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from clawstream.runtime.broker import node_config as config
from clawstream.runtime.broker.data_dir import (
    claim_directory,
    format_new,
    known_plans,
    last_lines,
    one_starter,
    under_way,
    write_node,
)
from clawstream.runtime.broker.jars import ensure_jars, find_java
from clawstream.runtime.broker.jvm import (
    BrokerError,
    Jvm,
    JvmDied,
    NotReady,
    ask_cluster,
    read_pid,
    recorded_pid,
    stop_pids,
)
from clawstream.runtime.broker.node_config import NodePlan
from clawstream.runtime.broker.start_cache import StartCache, start_cache
from clawstream.runtime.process.ports import check_free
from clawstream.schemas.settings import BrokerSettings

__all__ = [
    "BrokerError",
    "EmbeddedBroker",
    "NodeStatus",
    "broker_of",
    "start",
    "status",
    "stop",
]

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_PROGRESS_EVERY_S = 10.0
_STARTS_AGAIN = 5
"""Restarts of all nodes within one start: a node that runs out of memory each time must not loop.
"""
_KILLED = 128 + signal.SIGKILL
_CRASHED = frozenset(
    128 + number for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
)
Report = Callable[[str], None]


@dataclass(frozen=True)
class NodeStatus:
    """`pid` None: not running. `ready`: it serves clients."""

    node: int
    port: int
    pid: int | None
    ready: bool


class EmbeddedBroker:
    """A Kafka cluster of 1, 3 or 5 nodes on this machine, or its node here if `hosts` are several.

    Every error is a BrokerError, JarsError, JavaError or PortTaken. The JVMs die with this process
    unless started with `detach=True`. `advertised_host` is the name under which clients reach the
    broker; any name but loopback makes the broker listen on all interfaces (as a container needs).
    """

    def __init__(
        self,
        data_dir: Path,
        port: int = 19092,
        nodes: int = 1,
        heap_mb: int = 300,
        java: str | None = None,
        jars_dir: Path | None = None,
        *,
        advertised_host: str = config.LOOPBACK,
        hosts: tuple[str, ...] = (),
    ) -> None:
        if nodes not in (1, 3, 5):
            raise BrokerError(
                f"an embedded broker has 1, 3 or 5 nodes, not {nodes}: "
                "an even number survives no more deaths than the odd one below it. Set broker.nodes"
            )
        if "," in str(data_dir):
            raise BrokerError(
                f"data directory {data_dir} has a comma in its name, which Kafka reads as two "
                "directories"
            )
        self.data_dir = data_dir.expanduser().absolute()
        self.plans = config.plan_nodes(self.data_dir, port, nodes, advertised_host, hosts)
        if not self.plans:
            raise BrokerError(
                f"broker.advertised_host={advertised_host} is none of broker.hosts, "
                f"{', '.join(hosts)}: set it to the name of this machine among them"
            )
        self._heap_mb = heap_mb
        self._java_setting = java
        self._jars_setting = jars_dir
        self._detach = False
        self._jvms: dict[int, Jvm] = {}
        self._cluster_id = ""
        self.cache: StartCache | None = None
        """That of the last start; None before the first."""
        self._starts_again = 0
        self._on_cache: dict[int, bool] = {}

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{plan.advertised_host}:{plan.port}" for plan in self.plans.values())

    @property
    def pids(self) -> dict[int, int]:
        """Node to pid, of the nodes that this object started and that run."""
        return {node: jvm.pid for node, jvm in self._jvms.items() if jvm.exit_code is None}

    @property
    def exit_codes(self) -> dict[int, int]:
        """Node to exit code (128 + signal number for a killed one), of the nodes that have died."""
        return {
            node: jvm.exit_code for node, jvm in self._jvms.items() if jvm.exit_code is not None
        }

    def start(
        self,
        *,
        detach: bool = False,
        patience_s: float = READY_TIMEOUT_S,
        report: Report | None = None,
    ) -> None:
        """Format a new data directory, start every node, and return when all serve clients.

        A node of several that is killed during the start is started again. On failure, nothing that
        this call has started keeps running.

        Args:
            detach: Let the nodes outlive this process; also restart dead nodes of a running
                cluster.
            patience_s: Longest wait for another start to end and for the nodes to serve, in
                seconds. Fetching jars and formatting come on top.
            report: Called with a progress message every 10 s.

        Raises:
            PortTaken: Another process has a port.
            BrokerError: The directory's broker already runs (with its pid), a node ends (with the
                end of its log) or is stopped, or `patience_s` pass.
        """
        self._detach = detach
        self.data_dir.mkdir(parents=True, exist_ok=True)
        asked = time.monotonic()
        with one_starter(self.data_dir, patience_s, report):
            patience_s = max(0.0, patience_s - (time.monotonic() - asked))
            down = self._nodes_down(some_may_run=detach)
            cache = self._prepared(patience_s, report)
            for plan in down:
                check_free(config.LOOPBACK, plan.port, f"broker node {plan.node}", "broker.port")
                check_free(
                    config.LOOPBACK,
                    plan.controller_port,
                    f"the controller of broker node {plan.node}",
                    "broker.port",
                )
            self._cluster_id = claim_directory(self.data_dir, self.plans)
            self._format(down, cache)
            try:
                for plan in down:
                    self._launch(plan, cache)
                for plan in down:
                    self._await_ready(plan, frozenset(self.plans), patience_s, report)
            except BaseException:  # interrupted too: no node is left behind without its others
                self.stop()
                raise

    def kill(self, node: int = 1) -> None:
        """SIGKILL the node and wait until it is gone."""
        self._jvm(node).end(patience_s=0.0)

    def restart(self, node: int = 1) -> None:
        """Stop the node if it runs, start it on its data, return when it serves clients again.

        Its copies may still be catching up with those of the other nodes then.
        """
        plan = self.plans[node]
        self._jvm(node).end(STOP_TIMEOUT_S)
        with one_starter(self.data_dir, READY_TIMEOUT_S):
            self._launch(plan, self._prepared(READY_TIMEOUT_S))
            self._await_ready(plan, frozenset({node}), READY_TIMEOUT_S)

    def stop(self) -> None:
        """SIGTERM every node, wait 10 s, SIGKILL what is left. Nothing to stop is fine."""
        for jvm in self._jvms.values():
            jvm.signal(
                signal.SIGTERM
            )  # all at once: the last ones would wait for a quorum that is gone
        for node, jvm in self._jvms.items():
            jvm.end(STOP_TIMEOUT_S)
            self.plans[node].pid_file.unlink(missing_ok=True)
        self._jvms.clear()

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

    def _jvm(self, node: int) -> Jvm:
        if node not in self._jvms:
            raise BrokerError(
                f"node {node} of {self.data_dir} was not started by this EmbeddedBroker"
            )
        return self._jvms[node]

    def _nodes_down(self, some_may_run: bool) -> list[NodePlan]:
        """The nodes to start; raises BrokerError when there is a broker already."""
        pids = {plan.node: read_pid(plan) for plan in self.plans.values()}
        down = [plan for plan in self.plans.values() if pids[plan.node] is None]
        running = [f"node {node}, pid {pid}" for node, pid in pids.items() if pid is not None]
        if running and not (some_may_run and down):
            raise BrokerError(
                f"a broker already runs on {self.data_dir}: {'; '.join(running)}. "
                "Use it, stop it (clawstream broker stop), or choose another data directory"
            )
        for plan in down:
            plan.pid_file.unlink(missing_ok=True)
        return down

    def _prepared(self, patience_s: float, report: Report | None = None) -> StartCache:
        """Java and jars are there; a new count of starts again begins."""
        self._starts_again = 0
        jars = ensure_jars(self._jars_setting, patience_s=patience_s, report=report)
        self.cache = start_cache(find_java(self._java_setting), jars)
        return self.cache

    def _format(self, plans: list[NodePlan], cache: StartCache) -> None:
        try:
            format_new(plans, cache.java, cache.jars_dir, self._cluster_id, cache.options)
        except JvmDied as died:
            if died.exit_code not in _CRASHED or not cache.options:
                raise
            cache.discard(f"formatting ended with {died.exit_code}")
            format_new(plans, cache.java, cache.jars_dir, self._cluster_id)

    def _launch(self, plan: NodePlan, cache: StartCache) -> None:
        options = cache.options
        self._on_cache[plan.node] = bool(options)
        command = write_node(plan, cache.java, cache.jars_dir, self._heap_mb, options)
        parent_death_signal = None if self._detach else signal.SIGTERM
        jvm = self._jvms[plan.node] = Jvm(
            command, plan.output, parent_death_signal=parent_death_signal
        )
        plan.pid_file.write_text(f"{jvm.pid}\n", encoding="ascii")

    def _await_ready(
        self,
        plan: NodePlan,
        everyone: frozenset[int],
        patience_s: float,
        report: Report | None = None,
    ) -> None:
        """Wait until the node reports its cluster id and all brokers of `everyone` as serving."""
        started = reported = time.monotonic()
        while True:
            view = ask_cluster(config.LOOPBACK, plan.port)
            if (
                view is not None
                and view.cluster_id == self._cluster_id
                and everyone <= view.brokers
            ):
                return
            self._check_alive(everyone)
            now = time.monotonic()
            if now - started > patience_s or (
                report is not None and now - reported >= _PROGRESS_EVERY_S
            ):
                late = (everyone - view.brokers if view is not None else ()) or {plan.node}
                doing = "; ".join(under_way(self.plans[node]) for node in sorted(late))
                if now - started > patience_s:
                    raise NotReady(
                        f"the broker on port {plan.port} is not ready after {patience_s:.0f} s: "
                        f"{doing}. "
                        f"With more patience it would have gone on:\n{last_lines(plan)}"
                    )
                if report is not None:
                    reported = now
                    report(
                        f"the broker on port {plan.port} is not ready after {now - started:.0f} "
                        f"s: {doing}"
                    )
            time.sleep(_POLL_S)

    def _check_alive(self, everyone: frozenset[int]) -> None:
        """Raise when a node of `everyone` has ended and does not come back."""
        for node in sorted(everyone):
            if node not in self._jvms and read_pid(self.plans[node]) is None:
                raise BrokerError(
                    f"broker node {node}, which ran already, has ended meanwhile. Start the "
                    "broker again"
                )
            if node in self.exit_codes and not self._start_again(
                node, code := self.exit_codes[node]
            ):
                raise JvmDied(
                    f"broker node {node} exited with {code}:\n{last_lines(self.plans[node])}", code
                )

    def _start_again(self, node: int, code: int) -> bool:
        """Restart a node that died during the start; return False if it would only die again.

        A killed node of several is restarted, because the others wait for it; so is a node that
        crashed on a start cache, without the cache.
        """
        cache, stopped = self.cache, recorded_pid(self.plans[node]) != self._jvms[node].pid
        if cache is None or stopped or self._starts_again >= _STARTS_AGAIN:
            return False
        if code in _CRASHED and self._on_cache[node]:
            cache.discard(f"node {node} ended with {code}")
        elif code != _KILLED or len(self.plans) == 1:
            return False
        self._starts_again += 1
        self._launch(self.plans[node], cache)
        return True


def start(
    settings: BrokerSettings,
    data_dir: Path,
    *,
    patience_s: float = math.inf,
    report: Report | None = None,
) -> tuple[NodeStatus, ...]:
    """Start the broker, or its dead nodes, so that it outlives this process.

    By default the wait is unbounded: a broker that is stopped while it recovers its logs starts
    over.
    """
    broker_of(settings, data_dir).start(detach=True, patience_s=patience_s, report=report)
    return status(data_dir)


def stop(data_dir: Path) -> list[int]:
    """Stop the broker that runs on `data_dir` and return the stopped pids."""
    return stop_pids(known_plans(data_dir), STOP_TIMEOUT_S)


def status(data_dir: Path) -> tuple[NodeStatus, ...]:
    """Each node of `data_dir`; empty if no broker was ever started there."""
    return tuple(_node_status(plan) for plan in known_plans(data_dir))


def _node_status(plan: NodePlan) -> NodeStatus:
    pid = read_pid(plan)
    view = ask_cluster(config.LOOPBACK, plan.port) if pid is not None else None
    return NodeStatus(
        plan.node, plan.port, pid, ready=view is not None and plan.node in view.brokers
    )


def broker_of(settings: BrokerSettings, data_dir: Path) -> EmbeddedBroker:
    """Return the broker that the settings describe; it is not started."""
    return EmbeddedBroker(
        data_dir,
        settings.port,
        settings.cluster_size,
        settings.heap_mb,
        settings.java,
        settings.jars_dir,
        advertised_host=settings.advertised_host,
        hosts=settings.hosts,
    )

"""The embedded broker: a real Apache Kafka (KRaft) on this machine, without Docker and without an installed Java.

`EmbeddedBroker` runs one node, or several that replicate to each other, with everything below one data directory:

    cluster.json                 cluster id, number of nodes, port of the last start
    node-1/records/              Kafka's own data; present means formatted
    node-1/server.properties     written at each start; names the process, too
    node-1/broker.{log,out,pid}

Clients speak to `port` (node n: port + 10 * (n - 1)); each node's controller listens on the port after it.
The one owner of a broker's life under a supervisor is `run_foreground`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol, Self

from runtime import broker_config as config
from runtime.broker_config import NodePlan
from runtime.broker_process import (
    BrokerError,
    Jvm,
    JvmDied,
    NotReady,
    ask_cluster,
    check_port_free,
    read_pid,
    stop_pids,
    wait_gone,
)
from runtime.jars import Java, ensure_jars, find_java

__all__ = ["BrokerError", "EmbeddedBroker", "NodeStatus", "run_foreground", "start", "status", "stop"]

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_LOG_LINES = 20


class BrokerSettingsLike(Protocol):
    """The broker's part of the settings; its data directory depends on more of them and comes beside it."""

    @property
    def port(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def heap_mb(self) -> int: ...
    @property
    def java(self) -> str | None: ...
    @property
    def jars_dir(self) -> Path | None: ...


@dataclass(frozen=True)
class NodeStatus:
    """`pid` None: not running. `ready`: it serves clients."""

    node: int
    port: int
    pid: int | None
    ready: bool


class EmbeddedBroker:
    """One real Kafka cluster of 1, 3 or 5 nodes on this machine. Every error is a BrokerError, JarsError or JavaError.

    The JVMs die with this process unless started with `detach=True`. `advertised_host` is the name under which clients
    reach the broker; anything but loopback makes it listen on all interfaces (a container does that).
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
    ) -> None:
        if nodes not in (1, 3, 5):
            raise BrokerError(
                f"an embedded broker has 1, 3 or 5 nodes, not {nodes}: "
                "an even number survives no more deaths than the odd one below it. Set broker.nodes"
            )
        if "," in str(data_dir):
            raise BrokerError(
                f"data directory {data_dir} has a comma in its name, which Kafka reads as two directories"
            )
        self.data_dir = data_dir.expanduser().absolute()
        self.plans = config.plan_nodes(self.data_dir, port, nodes, advertised_host)
        self._heap_mb = heap_mb
        self._java_setting = java
        self._jars_setting = jars_dir
        self._detach = False
        self._jvms: dict[int, Jvm] = {}
        self._cluster_id = ""

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
        return {node: jvm.exit_code for node, jvm in self._jvms.items() if jvm.exit_code is not None}

    def start(self, *, detach: bool = False, patience_s: float = READY_TIMEOUT_S) -> None:
        """Format the data directory if it is new, start every node, return when all serve clients.

        With `detach`, nodes of a cluster that have died come back beside those that run: nobody else brings them back.
        Raises BrokerError if the directory's broker already runs (names its pid), a port is taken, a JVM exits (with
        the end of its log) or `patience_s` pass. Nothing that was started here is left running then.
        """
        self._detach = detach
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with _one_starter(self.data_dir):
            down = self._nodes_down(some_may_run=detach)
            java, jars_dir = find_java(self._java_setting), ensure_jars(self._jars_setting)
            for plan in down:
                check_port_free(config.LOOPBACK, plan.port, f"clients of node {plan.node}")
                check_port_free(config.LOOPBACK, plan.controller_port, f"controller of node {plan.node}")
            self._cluster_id = _claim_directory(self.data_dir, self.plans)
            _format_new(down, java, jars_dir, self._cluster_id)
            try:
                for plan in down:
                    self._launch(plan, java, jars_dir)
                for plan in down:
                    self._await_ready(plan, frozenset(self.plans), patience_s)
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
        with _one_starter(self.data_dir):
            self._launch(plan, find_java(self._java_setting), ensure_jars(self._jars_setting))
            self._await_ready(plan, frozenset({node}), READY_TIMEOUT_S)

    def stop(self) -> None:
        """SIGTERM every node, wait 10 s, SIGKILL what is left. Nothing to stop is fine."""
        for jvm in self._jvms.values():
            jvm.signal(signal.SIGTERM)  # all at once: the last ones would wait for a quorum that is gone
        for node, jvm in self._jvms.items():
            jvm.end(STOP_TIMEOUT_S)
            self.plans[node].pid_file.unlink(missing_ok=True)
        self._jvms.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _jvm(self, node: int) -> Jvm:
        if node not in self._jvms:
            raise BrokerError(f"node {node} of {self.data_dir} was not started by this EmbeddedBroker")
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

    def _launch(self, plan: NodePlan, java: Java, jars_dir: Path) -> None:
        plan.properties.write_text(config.render_server_properties(plan), encoding="ascii")
        plan.log4j2.write_text(config.render_log4j2(plan.log), encoding="ascii")
        command = config.server_command(java, jars_dir, plan, self._heap_mb)
        jvm = self._jvms[plan.node] = Jvm(command, plan.output, outlive_parent=self._detach)
        plan.pid_file.write_text(f"{jvm.pid}\n", encoding="ascii")

    def _await_ready(self, plan: NodePlan, everyone: frozenset[int], patience_s: float) -> None:
        """Until the node itself says that every broker of `everyone` serves, and that it is of this cluster."""
        deadline = time.monotonic() + patience_s
        while True:
            view = ask_cluster(config.LOOPBACK, plan.port)
            if view is not None and view.cluster_id == self._cluster_id and everyone <= view.brokers:
                return
            for node, code in self.exit_codes.items():
                if node in everyone:
                    raise JvmDied(f"broker node {node} exited with {code}:\n{_last_lines(self.plans[node])}", code)
            if time.monotonic() > deadline:
                raise NotReady(
                    f"broker node {plan.node} on port {plan.port} is not ready after {patience_s:.0f} s "
                    "(after an unclean end it reads its logs first; `clawstream broker run` waits for that):\n"
                    f"{_last_lines(plan)}"
                )
            time.sleep(_POLL_S)


def start(
    settings: BrokerSettingsLike, data_dir: Path, *, advertised_host: str = config.LOOPBACK
) -> tuple[NodeStatus, ...]:
    """Start the broker of `settings` on `data_dir`, or what has died of it, so that it outlives this process."""
    _of_settings(settings, data_dir, advertised_host).start(detach=True)
    return status(data_dir)


def stop(data_dir: Path) -> list[int]:
    """Stop the broker that runs on `data_dir`, whoever started it; return the pids that were stopped."""
    return stop_pids(_known_plans(data_dir), STOP_TIMEOUT_S)


def status(data_dir: Path) -> tuple[NodeStatus, ...]:
    """Each node of `data_dir`; empty if no broker was ever started there."""
    return tuple(_node_status(plan) for plan in _known_plans(data_dir))


def _node_status(plan: NodePlan) -> NodeStatus:
    pid = read_pid(plan)
    view = ask_cluster(config.LOOPBACK, plan.port) if pid is not None else None
    return NodeStatus(plan.node, plan.port, pid, ready=view is not None and plan.node in view.brokers)


class _StopAskedFor(BaseException):
    """SIGTERM or SIGINT."""


def run_foreground(settings: BrokerSettingsLike, data_dir: Path, *, advertised_host: str = config.LOOPBACK) -> int:
    """Be the broker's process for a supervisor: start it, stop it on SIGTERM or SIGINT, return the exit code.

    0 after a signal. The JVM's exit code when a single node dies: the supervisor starts us anew, and a pid file left
    by a kill -9 does not hinder that. With several nodes a dead one is restarted here, the others keep serving.
    Takes over this process' SIGTERM and SIGINT. Raises what EmbeddedBroker raises when a start fails.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise _StopAskedFor

    broker = _of_settings(settings, data_dir, advertised_host)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        # JVMs of a supervised parent that was killed have been told to stop and need a moment.
        wait_gone(list(broker.plans.values()), STOP_TIMEOUT_S)
        # No deadline: stopped in the middle of reading its logs, a node begins anew, and would never get to their end.
        broker.start(patience_s=math.inf)
        while True:
            for node, code in broker.exit_codes.items():
                if len(broker.plans) == 1:
                    return code
                _bring_back(broker, node)
            time.sleep(4 * _POLL_S)
    except _StopAskedFor:
        return 0
    except JvmDied as died:
        if died.exit_code <= 128:
            raise
        sys.stderr.write(f"{died}\n")  # killed within its start is killed all the same
        return died.exit_code
    finally:
        broker.stop()


def _bring_back(broker: EmbeddedBroker, node: int) -> None:
    """Restart a node that has died. Killed again within its start: later once more, for the others serve all the same.

    One that is not ready yet is left alone, so that others which have died come back meanwhile: it may wait for them.
    """
    try:
        broker.restart(node)
    except NotReady:
        return
    except JvmDied as died:
        if died.exit_code <= 128:
            raise


def _of_settings(settings: BrokerSettingsLike, data_dir: Path, advertised_host: str) -> EmbeddedBroker:
    return EmbeddedBroker(
        data_dir,
        settings.port,
        settings.nodes,
        settings.heap_mb,
        settings.java,
        settings.jars_dir,
        advertised_host=advertised_host,
    )


@contextmanager
def _one_starter(data_dir: Path) -> Iterator[None]:
    """Two processes that start a broker on one directory do it one after the other; the second finds it running."""
    with (data_dir / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _claim_directory(data_dir: Path, plans: dict[int, NodePlan]) -> str:
    """The directory's cluster id, a new one for a new directory. Raises BrokerError if its number of nodes differs."""
    path = data_dir / "cluster.json"
    known = json.loads(path.read_bytes()) if path.exists() else {"cluster_id": _new_cluster_id(), "nodes": len(plans)}
    if known["nodes"] != len(plans):
        raise BrokerError(
            f"{data_dir} holds a cluster of {known['nodes']} node(s), asked for {len(plans)}: "
            "set broker.nodes to that, or choose another data directory"
        )
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(known | {"port": plans[1].first_port}), encoding="utf-8")
    os.replace(partial, path)
    return str(known["cluster_id"])


def _known_plans(data_dir: Path) -> list[NodePlan]:
    data_dir = data_dir.expanduser().absolute()
    path = data_dir / "cluster.json"
    if not path.exists():
        return []
    known = json.loads(path.read_bytes())
    return list(config.plan_nodes(data_dir, known["port"], known["nodes"]).values())


def _new_cluster_id() -> str:
    """Kafka's form: 16 random bytes in URL-safe base64 without padding; not a dash first, which looks like an option."""
    return "C" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]


def _format_new(plans: list[NodePlan], java: Java, jars_dir: Path, cluster_id: str) -> None:
    """Format the nodes that have no records yet, all at once; a formatted directory appears whole or not at all."""
    new = [plan for plan in plans if not plan.records.exists()]
    with ThreadPoolExecutor(max_workers=len(plans)) as pool:
        for formatted in [pool.submit(_format, plan, java, jars_dir, cluster_id) for plan in new]:
            formatted.result()


def _format(plan: NodePlan, java: Java, jars_dir: Path, cluster_id: str) -> None:
    fresh = plan.directory / "formatting"
    shutil.rmtree(fresh, ignore_errors=True)
    plan.directory.mkdir(parents=True, exist_ok=True)
    properties = plan.directory / "formatting.properties"
    properties.write_text(config.render_server_properties(plan, records=fresh), encoding="ascii")
    command = config.format_command(java, jars_dir, properties, cluster_id)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=READY_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise BrokerError(f"formatting {plan.directory} failed:\n{error.stdout}{error.stderr}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokerError(f"formatting {plan.directory} failed: {error}") from error
    properties.unlink()
    fresh.rename(plan.records)


def _last_lines(plan: NodePlan) -> str:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in (plan.output, plan.log) if path.exists()]
    lines = [line for text in texts for line in text.splitlines()]
    return "\n".join([*lines[-_LOG_LINES:], f"(whole log: {plan.log})"])

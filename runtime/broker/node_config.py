"""The configuration of one broker node: ports, files, server.properties, log4j2, command lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clawstream.runtime.broker.class_archive import archive_options
from clawstream.runtime.broker.jars import Java

LARGEST_MESSAGE_BYTES = 10 * 1024 * 1024
PORT_STEP = 10
LOOPBACK = "127.0.0.1"
_LOADED = re.compile(r"\((\d+)/(\d+) completed in ")


@dataclass(frozen=True)
class NodePlan:
    """Node `node` of an embedded cluster, from 1.

    Clients speak to `port`, the controllers to each other on the port after it.
    hosts: Those of all nodes if they are several; each runs one node.
    """

    data_dir: Path
    node: int
    first_port: int
    advertised_host: str = LOOPBACK
    hosts: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """Number of nodes of the whole cluster."""
        return len(self.hosts) or 1

    @property
    def port(self) -> int:
        return self.first_port + PORT_STEP * (self.node - 1)

    @property
    def controller_port(self) -> int:
        return self.port + 1

    @property
    def voters(self) -> str:
        """The controllers of all nodes, as Kafka writes them."""
        hosts = enumerate(self.hosts or (LOOPBACK,))
        return ",".join(
            f"{i + 1}@{host}:{self.first_port + PORT_STEP * i + 1}" for i, host in hosts
        )

    @property
    def directory(self) -> Path:
        return self.data_dir / f"node-{self.node}"

    @property
    def records(self) -> Path:
        """Kafka's own directory; its presence means: formatted."""
        return self.directory / "records"

    @property
    def properties(self) -> Path:
        return self.directory / "server.properties"

    @property
    def log4j2(self) -> Path:
        return self.directory / "log4j2.properties"

    @property
    def log(self) -> Path:
        return self.directory / "broker.log"

    @property
    def output(self) -> Path:
        """What the JVM itself prints (crashes, warnings); truncated at each start."""
        return self.directory / "broker.out"

    @property
    def pid_file(self) -> Path:
        return self.directory / "broker.pid"


def plan_node(
    data_dir: Path, port: int, advertised_host: str = LOOPBACK, hosts: tuple[str, ...] = ()
) -> NodePlan:
    """Plan the node of this machine.

    Args:
        data_dir: The broker's data directory.
        port: Of the first node.
        advertised_host: By which clients reach this machine.
        hosts: Those of all nodes, with `advertised_host` among them; none: this one only.
    """
    node = hosts.index(advertised_host) + 1 if hosts else 1
    return NodePlan(data_dir, node, port, advertised_host, hosts if len(hosts) > 1 else ())


def render_server_properties(plan: NodePlan, records: Path | None = None) -> str:
    """Render `server.properties` of one node.

    `records` replaces the data directory for formatting.
    """
    # With several nodes the copies survive one node's death: two must have a record before it is
    # acknowledged.
    replicas, in_sync = (1, 1) if plan.nodes == 1 else (3, 2)
    bind = LOOPBACK if plan.advertised_host in (LOOPBACK, "localhost") else ""
    controller = f"CONTROLLER://{'' if plan.hosts else LOOPBACK}:{plan.controller_port}"
    return render_properties(
        {
            "process.roles": "broker,controller",
            "node.id": plan.node,
            "controller.quorum.voters": plan.voters,
            "listeners": f"PLAINTEXT://{bind}:{plan.port},{controller}",
            "advertised.listeners": f"PLAINTEXT://{plan.advertised_host}:{plan.port}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": records or plan.records,
            # A misspelt topic is an error, never a new topic.
            "auto.create.topics.enable": "false",
            "num.partitions": 4,
            "default.replication.factor": replicas,
            "min.insync.replicas": in_sync,
            "message.max.bytes": LARGEST_MESSAGE_BYTES,
            "replica.fetch.max.bytes": LARGEST_MESSAGE_BYTES,
            "replica.fetch.response.max.bytes": LARGEST_MESSAGE_BYTES,
            "offsets.topic.replication.factor": replicas,
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            "transaction.state.log.num.partitions": 2,
            "share.coordinator.state.topic.replication.factor": replicas,
            "share.coordinator.state.topic.min.isr": in_sync,
            "share.coordinator.state.topic.num.partitions": 1,
            # After a kill -9 the old registration must expire before the node may come back. A
            # shorter time would fence the only node of a busy machine, and no other could take
            # over; with several nodes another one leads meanwhile.
            "broker.session.timeout.ms": 9000 if plan.nodes == 1 else 3000,
            "broker.heartbeat.interval.ms": 500,
            "group.initial.rebalance.delay.ms": 0,
            # One machine, a small heap: few threads and a small buffer for compaction.
            "num.network.threads": 2,
            "num.io.threads": 2,
            "background.threads": 2,
            "num.recovery.threads.per.data.dir": 1,
            "log.cleaner.dedupe.buffer.size": 4 * 1024 * 1024,
            "log.cleaner.io.buffer.size": 256 * 1024,
            "log.segment.bytes": 64 * 1024 * 1024,
            "log.retention.check.interval.ms": 60_000,
        }
    )


def render_log4j2(log: Path) -> str:
    """Render a log4j2 configuration: warnings, errors and log recovery progress to `log`.

    The log is truncated at each start of the JVM; at most three files of 10 MB are kept.
    """
    of_one_partition = (
        "(Created|Deleted) log for .*|Log for .* is renamed .*|.*leaning for partition .*"
    )
    return render_properties(
        {
            "rootLogger.level": "WARN",
            "rootLogger.appenderRefs": "file",
            "rootLogger.appenderRef.file.ref": "FILE",
            "logger.logs.name": "kafka.log.LogManager",
            "logger.logs.level": "INFO",
            "logger.logs.filter.topics.type": "RegexFilter",
            "logger.logs.filter.topics.regex": of_one_partition,
            "logger.logs.filter.topics.onMatch": "DENY",
            "logger.logs.filter.topics.onMismatch": "NEUTRAL",
            "appender.file.type": "RollingFile",
            "appender.file.name": "FILE",
            "appender.file.fileName": log,
            "appender.file.filePattern": f"{log}.%i",
            "appender.file.layout.type": "PatternLayout",
            "appender.file.layout.pattern": "[%d] %p %m (%c)%n",
            "appender.file.policies.type": "Policies",
            "appender.file.policies.start.type": "OnStartupTriggeringPolicy",
            "appender.file.policies.size.type": "SizeBasedTriggeringPolicy",
            "appender.file.policies.size.size": "10MB",
            "appender.file.strategy.type": "DefaultRolloverStrategy",
            "appender.file.strategy.fileIndex": "min",
            "appender.file.strategy.max": 2,
        }
    )


def logs_read(log: str) -> tuple[int, int] | None:
    """Return (recovered, total) logs of a node since its start, or None.

    `log` is its broker.log.
    """
    found = _LOADED.findall(log)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def render_properties(values: Mapping[str, object]) -> str:
    return "".join(f"{name}={_escape(str(value))}\n" for name, value in values.items())


def _escape(value: str) -> str:
    """Java reads properties as Latin-1 with backslash escapes, code units of UTF-16."""
    units = value.replace("\\", "\\\\").encode("utf-16-be", "surrogatepass")
    codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)


def server_command(java: Java, jars_dir: Path, plan: NodePlan, heap_mb: int) -> list[str]:
    """Return the command line of one node; its server.properties identifies the process."""
    return [
        java.executable,
        f"-Xms{heap_mb}m",
        f"-Xmx{heap_mb}m",
        "-XX:+UseSerialGC",
        # starts sooner and needs less memory; the broker is not the bottleneck here
        "-XX:TieredStopAtLevel=1",
        "-XX:MaxDirectMemorySize=128m",
        "-XX:ReservedCodeCacheSize=64m",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        *java.quiet_options,
        *archive_options(java, jars_dir, may_write=True),
        f"-Dkafka.logs.dir={plan.directory}",
        f"-Dlog4j2.configurationFile={plan.log4j2}",
        "-cp",
        str(jars_dir / "*"),
        "kafka.Kafka",
        str(plan.properties),
    ]


def format_command(java: Java, jars_dir: Path, properties: Path, cluster_id: str) -> list[str]:
    """Return the command line that formats the data directory that `properties` describes."""
    return [
        java.executable,
        "-Xmx128m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        *java.quiet_options,
        # An archive of this tool's classes would lack those of a broker.
        *archive_options(java, jars_dir, may_write=False),
        "-cp",
        str(jars_dir / "*"),
        "kafka.tools.StorageTool",
        "format",
        "-t",
        cluster_id,
        "-c",
        str(properties),
    ]

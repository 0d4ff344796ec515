"""A broker's data directory: start lock, cluster identity (cluster.json) and node formatting."""

from __future__ import annotations

import base64
import json
import math
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from clawstream.runtime.atomic_file import write_durably
from clawstream.runtime.broker import node_config as config
from clawstream.runtime.broker.jars import Java
from clawstream.runtime.broker.jvm import BrokerError, JvmDied, NotReady
from clawstream.runtime.broker.node_config import NodePlan
from clawstream.runtime.file_lock import exclusive

FORMAT_TIMEOUT_S = 60.0
_LOG_LINES = 20


@contextmanager
def one_starter(
    data_dir: Path, patience_s: float = math.inf, report: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Serialize the starts of a broker on one directory; the second finds the broker running.

    Args:
        data_dir: The broker's data directory.
        patience_s: Longest wait for another start, in seconds.
        report: Called with a progress message every 10 s of waiting.

    Raises:
        NotReady: Another start is still under way after `patience_s`.
    """
    busy = f"another start of the broker on {data_dir} is under way"
    late = NotReady(f"{busy}, not done after {patience_s:.0f} s. Wait for it, or stop it")
    waiting = (
        None if report is None else lambda seconds: report(f"{busy}, waiting for {seconds:.0f} s")
    )
    with exclusive(data_dir / ".lock", late, patience_s, waiting):
        yield


def claim_directory(data_dir: Path, plan: NodePlan) -> str:
    """Return the cluster id of the directory; create one for a new directory.

    Raises:
        BrokerError: The directory has another number of nodes.
    """
    path = data_dir / "cluster.json"
    known = (
        json.loads(path.read_bytes())
        if path.exists()
        else {"cluster_id": new_cluster_id(plan.hosts), "nodes": plan.nodes}
    )
    if known["nodes"] != plan.nodes:
        raise BrokerError(
            f"{data_dir} holds a cluster of {known['nodes']} node(s), asked for {plan.nodes}: "
            "set broker.hosts to that many, or choose another data directory"
        )
    started = {"port": plan.first_port, "host": plan.advertised_host, "hosts": plan.hosts}
    write_durably(path, json.dumps(known | started).encode())
    return str(known["cluster_id"])


def known_plan(data_dir: Path) -> NodePlan | None:
    """The node that was last started there; None if there was never one."""
    data_dir = data_dir.expanduser().absolute()
    path = data_dir / "cluster.json"
    if not path.exists():
        return None
    known = json.loads(path.read_bytes())
    return config.plan_node(data_dir, known["port"], known["host"], tuple(known["hosts"]))


def new_cluster_id(hosts: Sequence[str] = ()) -> str:
    """Return a new cluster id: 16 bytes in URL-safe base64 without padding, as Kafka uses.

    The bytes are random; those of several hosts follow from their names, because each formats its
    node by itself. The first character is never a dash, which would look like an option.
    """
    seed = sha256(" ".join(hosts).encode()).digest()[:16] if hosts else uuid.uuid4().bytes
    return "C" + base64.urlsafe_b64encode(seed).decode()[1:22]


def format_new(plan: NodePlan, java: Java, jars_dir: Path, cluster_id: str) -> None:
    """Format a node without records; a formatted directory is complete or absent.

    Raises:
        BrokerError: The node cannot be formatted.
        JvmDied: Java ended with an error.
    """
    if plan.records.exists():
        return
    fresh = plan.directory / "formatting"
    shutil.rmtree(fresh, ignore_errors=True)
    plan.directory.mkdir(parents=True, exist_ok=True)
    properties = plan.directory / "formatting.properties"
    properties.write_text(config.render_server_properties(plan, records=fresh), encoding="ascii")
    command = config.format_command(java, jars_dir, properties, cluster_id)
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        code = error.returncode if error.returncode >= 0 else 128 - error.returncode
        raise JvmDied(
            f"formatting {plan.directory} failed with {code}:\n{error.stdout}{error.stderr}", code
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokerError(f"formatting {plan.directory} failed: {error}") from error
    properties.unlink()
    fresh.rename(plan.records)


def write_node(plan: NodePlan, java: Java, jars_dir: Path, heap_mb: int) -> list[str]:
    """Write the configuration files of a node and return its command line."""
    plan.properties.write_text(config.render_server_properties(plan), encoding="ascii")
    plan.log4j2.write_text(config.render_log4j2(plan.log), encoding="ascii")
    return config.server_command(java, jars_dir, plan, heap_mb)


def last_lines(plan: NodePlan) -> str:
    """Return the end of the node's output and log, and the path of the whole log."""
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in (plan.output, plan.log)
        if path.exists()
    ]
    lines = [line for text in texts for line in text.splitlines()]
    return "\n".join([*lines[-_LOG_LINES:], f"(whole log: {plan.log})"])


def under_way(plan: NodePlan) -> str:
    """Say how far a node is that does not serve yet, by its log."""
    progress = None
    with suppress(FileNotFoundError):
        # An older log is that of the run before.
        if plan.log.stat().st_mtime >= plan.pid_file.stat().st_mtime:
            progress = config.logs_read(plan.log.read_text(encoding="utf-8", errors="replace"))
    if progress is None:
        return f"node {plan.node} starts (after an unclean end it reads its logs first)"
    return f"node {plan.node} has read {progress[0]} of its {progress[1]} logs"

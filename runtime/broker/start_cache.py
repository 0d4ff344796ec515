"""The broker's start cache: loaded and linked classes in one file beside the jars.

A start with it takes half the CPU time. Java writes the file at the end of a training run: a broker
of one node on an empty directory, started and stopped. The file is valid for one Java build, one
set of jars and one set of options, and its name is a hash of these. It is optional: Java ignores a
file that it does not accept and starts more slowly. The pinned runtime ships no base CDS archive,
so -XX:+AutoCreateSharedArchive cannot replace this module.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.runtime.atomic_file import fsync_path
from clawstream.runtime.broker import node_config as config
from clawstream.runtime.broker.data_dir import format_new, last_lines, new_cluster_id, write_node
from clawstream.runtime.broker.jars import Java, jars_stamp
from clawstream.runtime.broker.jvm import BrokerError, Jvm, ask_cluster
from clawstream.runtime.file_lock import exclusive
from clawstream.runtime.logs import logger
from clawstream.runtime.process.ports import PortTaken, check_free

_HEAP_MB = 200
_LOWEST_PRIORITY = 19
_READY_TIMEOUT_S = 600.0
_WRITE_TIMEOUT_S = 600.0
NEEDED_BYTES = 1 << 30
"""Free space below which none is made: a disk that is full takes the broker that serves with it."""
_UNUSED_S = 30 * 24 * 3600.0
_PORTS = range(20000, 32000)
_PORT_TRIES = 50


class StartCacheError(BrokerError):
    """No start cache could be made; says why. Brokers start all the same, only slower."""


class _BeingMade(Exception):
    """Another process creates the cache."""


@dataclass
class StartCache:
    """Where the start cache of these jars and this Java is, made or not."""

    java: Java
    jars_dir: Path
    path: Path
    discarded: bool = field(default=False, init=False)

    @property
    def made(self) -> bool:
        return self.path.exists()

    @property
    def options(self) -> list[str]:
        """Return the JVM options that use the cache, none without a cache.

        Java verifies its checksum.
        """
        return _use(self.java, self.path) if self.made and not self.discarded else []

    def discard(self, why: str) -> None:
        """Stop using the cache and delete its file if permitted.

        Starts are slow until the next one.
        """
        logger().warning("start_cache_discarded", path=str(self.path), why=why)
        self.discarded = True
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def start_cache(java: Java, jars_dir: Path) -> StartCache:
    """That of the jars which `ensure_jars` has put there."""
    basis = [
        java.executable,
        java.build,
        jars_stamp(jars_dir),
        str(jars_dir),
        config.server_options(java, _HEAP_MB),
    ]
    key = hashlib.sha256(json.dumps(basis).encode()).hexdigest()[:12]
    return StartCache(
        java,
        jars_dir,
        jars_dir / f"start-java{java.version}-{key}.{'aot' if _aot(java) else 'jsa'}",
    )


def make_start_cache(cache: StartCache, niceness: int = 0) -> bool:
    """Create the cache unless Java accepts the existing file; takes about 20 s of CPU time.

    The file appears complete or not at all. The training broker ends with this process; if that is
    killed while Java writes the file, a child of Java continues for some seconds without effect,
    and the next call removes its files.

    Returns:
        False when another process creates the cache.

    Raises:
        StartCacheError: No cache could be created.
    """
    try:
        with exclusive(cache.jars_dir / ".start-cache.lock", _BeingMade(), patience_s=0.0):
            _make(cache, niceness)
        return True
    except _BeingMade:
        return False
    except OSError as error:
        raise StartCacheError(f"no start cache: {error}") from error


def _make(cache: StartCache, niceness: int) -> None:
    for leftover in cache.jars_dir.glob(".training-*"):
        shutil.rmtree(
            leftover, ignore_errors=True
        )  # of a process that was killed; the lock says it is not running
    if cache.made and _accepted(cache, cache.path, niceness):
        return
    if shutil.disk_usage(cache.jars_dir).free < NEEDED_BYTES:
        raise StartCacheError(
            f"no start cache is made with less than {NEEDED_BYTES >> 20} MiB free in "
            f"{cache.jars_dir}"
        )
    with tempfile.TemporaryDirectory(
        prefix=".training-", dir=cache.jars_dir, ignore_cleanup_errors=True
    ) as directory:
        draft = _train(cache, Path(directory), niceness)
        fsync_path(draft)
        draft.replace(cache.path)
    _remove_unused(cache)


def make_in_background(cache: StartCache, after_s: float = 30.0) -> None:
    """Create the cache `after_s` from now in a thread that logs the result.

    The delay lets the processes start first that waited for the broker.
    """
    threading.Thread(
        target=_make_later, args=(cache, after_s), name="start-cache", daemon=True
    ).start()


def _make_later(cache: StartCache, after_s: float) -> None:
    time.sleep(after_s)
    try:
        made = make_start_cache(cache, niceness=_LOWEST_PRIORITY)
    except BrokerError as error:
        logger().warning("start_cache_not_made", error=str(error))
    else:
        logger().info("start_cache", path=str(cache.path), made=made)


def _aot(java: Java) -> bool:
    """Return whether Java writes ahead-of-time caches (25 and newer).

    Older ones write CDS archives.
    """
    return java.version >= 25


def _use(java: Java, path: Path) -> list[str]:
    return [
        "-XX:+VerifySharedSpaces",
        f"-XX:AOTCache={path}" if _aot(java) else f"-XX:SharedArchiveFile={path}",
    ]


def _train(cache: StartCache, directory: Path, niceness: int) -> Path:
    """The finished file below `directory`, accepted by Java."""
    draft = directory / cache.path.name
    write = (
        f"-XX:AOTCacheOutput={draft}" if _aot(cache.java) else f"-XX:ArchiveClassesAtExit={draft}"
    )
    plan = config.plan_nodes(directory, _free_port(), 1)[1]
    format_new([plan], cache.java, cache.jars_dir, new_cluster_id(), wrapper=_nice(niceness))
    command = write_node(plan, cache.java, cache.jars_dir, _HEAP_MB, [write])
    # Not SIGTERM: it would write the file first, for nobody.
    jvm = Jvm([*_nice(niceness), *command], plan.output, parent_death_signal=signal.SIGKILL)
    try:
        _await_ready(plan, jvm)
        jvm.end(_WRITE_TIMEOUT_S)  # it writes the file once it has stopped
    finally:
        jvm.end(0.0)
    if not draft.exists() or not _accepted(cache, draft, niceness):
        raise StartCacheError(
            f"no start cache: Java did not write one that it takes:\n{last_lines(plan)}"
        )
    return draft


def _nice(niceness: int) -> list[str]:
    return ["nice", "-n", str(niceness)]


def _accepted(cache: StartCache, path: Path, niceness: int) -> bool:
    """Whether Java starts when it must use the file; a start that may use it does not tell."""
    strict = "-XX:AOTMode=on" if _aot(cache.java) else "-Xshare:on"
    look = config.look_command(
        cache.java, cache.jars_dir, _HEAP_MB, [*_use(cache.java, path), strict]
    )
    try:
        return (
            subprocess.run(
                [*_nice(niceness), *look], capture_output=True, timeout=_READY_TIMEOUT_S
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def _await_ready(plan: config.NodePlan, jvm: Jvm) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        view = ask_cluster(config.LOOPBACK, plan.port)
        if view is not None and plan.node in view.brokers:
            return
        if jvm.exit_code is not None:
            raise StartCacheError(
                f"no start cache: its training run ended with {jvm.exit_code}:\n{last_lines(plan)}"
            )
        if time.monotonic() > deadline:
            raise StartCacheError(
                f"no start cache: its training run is not ready after {_READY_TIMEOUT_S:.0f} s"
            )
        time.sleep(0.2)


def _free_port() -> int:
    """One that is free together with the next, below those that the kernel hands out to clients."""
    for port in random.sample(_PORTS, _PORT_TRIES):
        try:
            check_free(config.LOOPBACK, port, "the training run", "broker.port")
            check_free(config.LOOPBACK, port + 1, "the training run", "broker.port")
        except PortTaken:
            continue
        return port
    raise StartCacheError(
        f"no start cache: found no free port for its training run in {_PORT_TRIES} tries"
    )


def _remove_unused(kept: StartCache) -> None:
    """Those of jars and Javas that are gone: nothing has read them for a month."""
    for path in kept.jars_dir.glob("start-java*"):
        if (
            path != kept.path
            and time.time() - max(path.stat().st_atime, path.stat().st_mtime) > _UNUSED_S
        ):
            path.unlink(missing_ok=True)

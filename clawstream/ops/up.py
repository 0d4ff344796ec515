"""`clawstream up`: all processes on one machine, on the embedded broker or another cluster.

They stop in order so that no topic has a backlog: the gateway with its spool, the jobs once they
have no lag, admission, trainer and rollout, the lake, and finally the broker.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self

from clawstream.ops.lag import data_lag
from clawstream.ops.preflight import check
from clawstream.runtime.broker.embedded import BrokerError, status
from clawstream.runtime.exit_codes import EXIT_SETTINGS
from clawstream.runtime.kafka import Denied, KafkaError
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import run_async
from clawstream.runtime.process.readiness import ready
from clawstream.runtime.process.remembered_settings import (
    FILE,
    changes,
    forget,
    missing_secrets,
    remember,
)
from clawstream.runtime.process.supervisor import KILLED, ProcessSpec, Supervisor, Unwritable
from clawstream.runtime.topics.records import cluster_of
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings

COMMANDS = {
    "broker": ("broker", "run"),
    "gateway": ("gateway",),
    "assemble": ("jobs", "assemble"),
    "reward": ("jobs", "reward"),
    "compare": ("jobs", "compare"),
    "admit": ("admit",),
    "lake": ("lake",),
    "trainer": ("train",),
    "rollout": ("rollout",),
    "traces": ("traces",),
    "monitor": ("monitor",),
}


def wanted(settings: Settings) -> list[str]:
    """Return the processes to start, in order; without a model only the data part.

    Raises:
        SettingsError: The settings name an unknown process.
    """
    unknown = set(settings.up.processes) - COMMANDS.keys()
    if unknown:
        raise SettingsError(
            f"setting up.processes: {sorted(unknown)} unknown, there are {sorted(COMMANDS)}"
        )
    left_out = set[str]()
    if settings.kafka.bootstrap_servers is not None:
        left_out.add("broker")
    if not settings.jobs.compares_groups:
        left_out.add("compare")
    if settings.trainer.model_path is None:
        left_out.add("trainer")
        if not (settings.rollout.model_path or settings.rollout.attach_urls):
            left_out.add("rollout")
    if settings.traces.endpoint is None:
        left_out.add("traces")
    if settings.metrics.port is None:
        left_out.add("monitor")
    return [n for n in COMMANDS if n in settings.up.processes and n not in left_out]


def of_children(settings: Settings) -> Settings:
    """Give the stream jobs fixed worker ids, so that a restarted one keeps its partitions."""
    worker = settings.jobs.worker_id or f"up-{socket.gethostname()}"
    return settings.model_copy(
        update={"jobs": settings.jobs.model_copy(update={"worker_id": worker})}
    )


def instances(settings: Settings, name: str) -> dict[str, Settings]:
    """Return the processes of a name and their settings: one for each rollout worker."""
    workers = settings.rollout.of_each_worker if name == "rollout" else ()
    if len(workers) < 2:
        return {name: settings}
    return {
        f"{name}-{index}": settings.model_copy(
            update={"rollout": worker, "metrics": settings.metrics.after(index)}
        )
        for index, worker in enumerate(workers)
    }


class Installation:
    """All processes of one data directory, as an `async with` block.

    The directory remembers the settings. The processes get them on standard input, because a
    command line with secrets is visible to every user.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings.model_copy(update={"data_dir": settings.data_dir.absolute()})
        self.supervisor = Supervisor(
            self.settings.data_dir, settings.up.restart_delay_s, settings.up.stop_timeout_s
        )
        self.cluster = cluster_of(settings)
        self._before: bytes | None = None
        self._broker_is_new = not any(settings.broker_dir.glob("node-*/records"))

    async def __aenter__(self) -> Self:
        """Take the directory. Raises AlreadyRunning or Unwritable."""
        await self.supervisor.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Stop the remaining processes and release the directory."""
        await self.supervisor.__aexit__(*error)

    def remember(self) -> None:
        """Store the settings in the data directory.

        Raises SettingsError for a missing secret, Unwritable.
        """
        if missing := missing_secrets(self.settings):
            lines = [
                f"setting {path}: secrets are not remembered; give it again" for path in missing
            ]
            file = self.settings.data_dir / FILE
            lines.append(f"To continue without it: delete {file}, give all settings")
            raise SettingsError("\n".join(lines))
        for path, before, now in changes(self.settings):
            hint = "data that was written before stays where it is"
            logger().warning("setting_changed", setting=path, before=before, now=now, hint=hint)
        try:
            self._before = remember(self.settings)
        except OSError as e:
            raise Unwritable(f"data_dir={self.settings.data_dir} cannot be written to: {e}") from e

    def forget(self) -> None:
        """Restore what the data directory remembered before: these settings are wrong."""
        forget(self.settings.data_dir, self._before)

    def start(self, *names: str) -> None:
        """Start processes by name, and of rollout each worker."""
        children = of_children(self.settings)
        for name in names:
            command = python(*COMMANDS[name], "--config", "-")
            for process, settings in instances(children, name).items():
                stdin = settings.model_dump_json().encode()
                self.supervisor.start(ProcessSpec(process, command, stdin))

    async def wait_for_kafka(self, timeout_s: float = 60.0, report_every_s: float = 10.0) -> None:
        """Wait until the cluster answers; report while an embedded broker recovers.

        An embedded broker that runs may take any time: after an unclean shutdown it recovers its
        logs.

        Raises:
            KafkaError: Another cluster does not answer within `timeout_s`, or refuses the login.
            BrokerError: The embedded broker does not run after that time.
        """
        if "broker" in self.supervisor.table:
            await self._wait_for_own_broker(timeout_s, report_every_s)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await asyncio.to_thread(self.cluster.topics)
                return
            except KafkaError as e:
                if isinstance(e, Denied) or time.monotonic() > deadline:
                    raise
                logger().debug("waiting_for_kafka", error=str(e))

    async def _wait_for_own_broker(self, timeout_s: float, report_every_s: float) -> None:
        started = reported = time.monotonic()
        log = self.settings.data_dir / "logs" / "broker.log"
        directory = self.settings.broker_dir
        while (node := await asyncio.to_thread(status, directory)) is None or not node.ready:
            broker = self.supervisor.table["broker"]
            # A killed broker is restarted.
            killed = broker["state"] == "restarting" and broker["exit_code"] in KILLED
            now = time.monotonic()
            if broker["state"] != "running" and not killed and now - started > timeout_s:
                raise BrokerError(
                    f"the broker on {directory} does not run after "
                    f"{now - started:.0f} s: {broker['state']}, "
                    f"exit code {broker['exit_code']}, {broker['restarts']} restarts: "
                    f"{broker['error'] or 'no error was logged'}. Its log: {log}"
                )
            if now - reported >= report_every_s:
                reported, seconds = now, round(now - started)
                hint = (
                    "the first start prepares its data directory"
                    if self._broker_is_new
                    else "after an unclean shutdown it reads its logs first"
                )
                logger().info(
                    "waiting_for_broker", seconds=seconds, state=broker["state"],
                    hint=hint, log=str(log),
                )  # fmt: skip
            await asyncio.sleep(0.1)

    async def drain(self, groups: Sequence[str], what: str) -> bool:
        """Wait until no group has a lag in two samples in a row; False after `up.drain_timeout_s`.

        groups: Full names of consumer groups. what: For the log.
        """
        deadline = time.monotonic() + self.settings.up.drain_timeout_s
        clean = 0
        lags: dict[str, int] = {}
        while clean < 2:
            if self._broker_is_down:
                reason = "the broker does not run; all is read after the next start"
                logger().error("drain_skipped", what=what, reason=reason)
                return False
            try:
                lags = {
                    g: await asyncio.to_thread(data_lag, self.cluster, self.settings, g)
                    for g in groups
                }
                clean = clean + 1 if not any(lags.values()) else 0
            except KafkaError as e:
                clean = 0
                logger().warning("drain_lag_unknown", what=what, error=str(e))
            if time.monotonic() > deadline:
                logger().error("drain_timeout", what=what, lag={g: n for g, n in lags.items() if n})
                return False
            await asyncio.sleep(0.3)
        return True

    @property
    def _broker_is_down(self) -> bool:
        """Whether the embedded broker cannot run, e.g. on a full disk: no lag is known then."""
        broker = self.supervisor.table.get("broker")
        if broker is None or broker["state"] == "running":
            return False
        return broker["exit_code"] not in KILLED

    def _running(self, name: str) -> bool:
        return self.supervisor.table.get(name, {}).get("state") in ("running", "restarting")

    async def stop_in_order(self, keep_broker: bool = False) -> bool:
        """Stop everything; return whether every stage had no lag left when it was stopped."""
        prefix, run = self.settings.kafka.topic_prefix, self.settings.run_id
        jobs = [f"{prefix}-assemble"]
        if self._running("reward"):
            jobs += [f"{prefix}-reward", *jobs]  # a reward is an input of assemble
        admits = [f"{prefix}-admit.{run}.{c}" for c in self.settings.admit.channels]
        clean = True
        await self.supervisor.stop("gateway")
        if self._running("assemble"):
            clean &= await self.drain(jobs, "jobs")
        if self._running("admit"):
            clean &= await self.drain(admits, "admit")
        if self._running("trainer"):
            clean &= await self.drain([f"{prefix}-trainer.{run}.train"], "trainer")
        # Not drained: its position stays before the first group that waits for members.
        await self.supervisor.stop("assemble", "reward", "compare")
        for name in ("admit", "trainer", "rollout"):
            await self.supervisor.stop(*instances(self.settings, name))
        if self._running("lake"):
            clean &= await self.drain([f"{prefix}-lake"], "lake")
        # Not drained: a collector may be away for long, and the next start goes on.
        await self.supervisor.stop("lake", "traces", "monitor")
        if not keep_broker:
            await self.stop_broker()
        return clean

    async def stop_broker(self) -> None:
        """Stop the broker and release the directory."""
        await self.supervisor.stop("broker")
        self.supervisor.release()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work; return True once it is done, or False when `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        working.cancel()
        stopping.cancel()


async def _start(installation: Installation, names: Sequence[str]) -> None:
    """Start the processes in order, and wait until all are ready.

    Raises SettingsError when one ends for its settings.
    """
    settings, supervisor = installation.settings, installation.supervisor
    if "broker" in names:
        installation.start("broker")
    await installation.wait_for_kafka()
    if "broker" not in names:
        logger().info("ready", name="kafka", status=settings.bootstrap_servers)
    installation.start(*(n for n in names if n != "broker"))
    if settings.trainer.model_path is None:
        logger().info("no_model", hint="set trainer.model_path=DIR to train and serve")
    processes = [process for name in names for process in instances(settings, name)]
    await supervisor.wait_settled(processes)
    rows = {process: supervisor.table[process] for process in processes}
    wrong = [f"{n}: {r['error']}" for n, r in rows.items() if r["exit_code"] == EXIT_SETTINGS]
    if wrong:
        installation.forget()
        raise SettingsError("\n".join(wrong))
    down = {n: r["state"] for n, r in rows.items() if not r["ready"] and r["exit_code"] != 0}
    if down:
        logger().error("not_all_up", down=down)
        return
    logger().info(
        "up",
        processes=processes,
        gateway=f"http://{settings.gateway.host}:{settings.gateway.port}",
        kafka=settings.bootstrap_servers,
        logs=str(settings.data_dir / "logs"),
    )
    ready("up")


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Run everything until `stop`.

    Raises SettingsError, AlreadyRunning, PortTaken or KafkaError before anything is left running.
    """
    names = wanted(settings)
    all_read: bool | None = None
    async with Installation(settings) as installation:
        await asyncio.to_thread(check, settings, names)
        installation.remember()
        started = await _unless(stop, _start(installation, names))
        await stop.wait()
        began = time.monotonic()
        if started:
            logger().info("stopping", hint="waiting until every process has read its topics")
            all_read = await installation.stop_in_order()
    # The last line, so that its absence tells of a crash. all_read: None: it was still starting.
    logger().info("stopped", seconds=round(time.monotonic() - began, 1), all_read=all_read)


def run(settings: Settings) -> None:
    """Entry point of `clawstream up`."""
    run_async("up", settings, main)


def python(*words: str) -> list[str]:
    """Return the command line of one of our own processes."""
    # -P: a user's `clawstream.py` in the working directory must not hide the package.
    return [sys.executable, "-P", "-m", "clawstream", *words]

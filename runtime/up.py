"""`clawstream up`: all processes on one machine, on the embedded broker or another cluster.

Stopping is ordered, so that nothing is left behind in a topic: gateway (with its spool), then the jobs once they have no
lag, then admission, trainer and rollout, then the lake, and the broker last.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from runtime.broker import BrokerError, status
from runtime.kafka import KafkaError
from runtime.lag import data_lag
from runtime.lifecycle import run_async
from runtime.records import cluster_of
from runtime.supervisor import KILLED, ProcessSpec, Supervisor, python
from runtime.telemetry import logger
from schemas.errors import SettingsError
from schemas.settings import Settings

COMMANDS = {
    "broker": ("broker", "run"),
    "gateway": ("gateway",),
    "assemble": ("jobs", "assemble"),
    "reward": ("jobs", "reward"),
    "admit": ("admit",),
    "lake": ("lake",),
    "trainer": ("train",),
    "rollout": ("rollout",),
}
NEED_MODEL = ("trainer", "rollout")


def wanted(settings: Settings) -> list[str]:
    """Processes to start, in order. Without a model there is nothing to train or serve: only the data part."""
    unknown = set(settings.up.processes) - COMMANDS.keys()
    if unknown:
        raise SettingsError(f"setting up.processes: {sorted(unknown)} unknown, there are {sorted(COMMANDS)}")
    names = [n for n in COMMANDS if n in settings.up.processes]
    if settings.kafka.bootstrap_servers is not None and "broker" in names:
        names.remove("broker")
    if settings.trainer.model_path is None:
        names = [n for n in names if n not in NEED_MODEL or (n == "rollout" and settings.rollout.attach_url)]
    return names


class Installation:
    """The processes of one data directory, as a whole."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.supervisor = Supervisor(
            settings.data_dir.absolute(), settings.up.restart_delay_s, settings.up.stop_timeout_s
        )
        self._config = settings.data_dir.absolute() / "up.settings.json"
        self.cluster = cluster_of(settings)

    def prepare(self) -> None:
        """Take the directory and leave the settings there for the children: on a command line everybody could read secrets."""
        self.supervisor.acquire()
        self._write_settings()

    def _write_settings(self) -> None:
        absolute = self.settings.model_copy(update={"data_dir": self.settings.data_dir.absolute()})
        descriptor = os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as f:
            f.write(absolute.model_dump_json(exclude_defaults=True))

    def start(self, *names: str) -> None:
        """Start processes by name."""
        for name in names:
            self.supervisor.start(ProcessSpec(name, python(*COMMANDS[name], "--config", str(self._config))))

    async def wait_for_kafka(self, timeout_s: float = 60.0, say_every_s: float = 10.0) -> None:
        """Wait until the cluster answers, and say so while a broker of our own takes its time.

        Raises KafkaError when a cluster does not answer for `timeout_s`, BrokerError when our own broker does not run after that. While
        it runs it may take as long as it takes: after an unclean end it reads its logs first.
        """
        if "broker" in self.supervisor.table:
            await self._wait_for_own_broker(timeout_s, say_every_s)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await asyncio.to_thread(self.cluster.topics)
                return
            except KafkaError as e:
                if time.monotonic() > deadline:
                    raise
                logger().debug("waiting_for_kafka", error=str(e))

    async def _wait_for_own_broker(self, timeout_s: float, say_every_s: float) -> None:
        started = said = time.monotonic()
        log = self.settings.data_dir / "logs" / "broker.log"
        while not any(node.ready for node in await asyncio.to_thread(status, self.settings.broker_dir)):
            broker = self.supervisor.table["broker"]
            # One that was killed did nothing wrong, and comes back.
            killed = broker["state"] == "restarting" and broker["exit_code"] in KILLED
            now = time.monotonic()
            if broker["state"] != "running" and not killed and now - started > timeout_s:
                raise BrokerError(
                    f"the broker on {self.settings.broker_dir} does not run after {now - started:.0f} s: {broker['state']}, "
                    f"exit code {broker['exit_code']}, {broker['restarts']} restarts. Its log says why: {log}"
                )
            if now - said >= say_every_s:
                said = now
                hint = "it starts; after an unclean end it reads its logs first"
                logger().info(
                    "waiting_for_broker", seconds=round(now - started), state=broker["state"], hint=hint, log=str(log)
                )
            await asyncio.sleep(0.1)

    async def drain(self, groups: Sequence[str], what: str) -> bool:
        """Wait until every group has read all data there is, seen twice in a row; False after drain_timeout_s."""
        deadline = time.monotonic() + self.settings.up.drain_timeout_s
        clean = 0
        lags: dict[str, int] = {}
        while clean < 2:
            try:
                lags = {g: await asyncio.to_thread(data_lag, self.cluster, self.settings, g) for g in groups}
                clean = clean + 1 if not any(lags.values()) else 0
            except KafkaError as e:
                clean = 0
                logger().warning("drain_lag_unknown", what=what, error=str(e))
            if time.monotonic() > deadline:
                logger().error("drain_timeout", what=what, lag={g: n for g, n in lags.items() if n})
                return False
            await asyncio.sleep(0.3)
        return True

    def _running(self, name: str) -> bool:
        return self.supervisor.table.get(name, {}).get("state") in ("running", "restarting")

    async def stop_in_order(self, keep_broker: bool = False) -> bool:
        """Stop everything; True when every stage had no lag left when it was stopped."""
        prefix, run = self.settings.kafka.topic_prefix, self.settings.run_id
        channels = self.settings.admit.channels
        clean = True
        await self.supervisor.stop("gateway")
        if self._running("assemble"):
            groups = [f"{prefix}-assemble", *([f"{prefix}-reward"] if self._running("reward") else [])]
            clean &= await self.drain([*groups, groups[0]], "jobs")
        if self._running("admit"):
            clean &= await self.drain([f"{prefix}-admit.{run}.{c}" for c in channels], "admit")
        if self._running("trainer"):
            clean &= await self.drain([f"{prefix}-trainer.{run}.train"], "trainer")
        await self.supervisor.stop("assemble", "reward")
        await self.supervisor.stop("admit")
        await self.supervisor.stop("trainer")
        await self.supervisor.stop("rollout")
        if self._running("lake"):
            clean &= await self.drain([f"{prefix}-lake"], "lake")
        await self.supervisor.stop("lake")
        if not keep_broker:
            await self.stop_broker()
        return clean

    async def stop_broker(self) -> None:
        """Stop the broker and let another supervisor have the directory."""
        await self.supervisor.stop("broker")
        self.supervisor.release()


async def _kafka_or_stop(installation: Installation, stop: asyncio.Event) -> bool:
    """True once the cluster answers, False when `stop` came first: a wait without an end must be one that can be stopped."""
    ready, stopping = asyncio.create_task(installation.wait_for_kafka()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return False
        await ready
        return True
    finally:
        ready.cancel()
        stopping.cancel()


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Run everything until `stop`."""
    names = wanted(settings)
    installation = Installation(settings)
    installation.prepare()
    try:
        if "broker" in names:
            installation.start("broker")
        if not await _kafka_or_stop(installation, stop):
            return
        installation.start(*(n for n in names if n != "broker"))
        logger().info(
            "up",
            processes=names,
            gateway=f"http://{settings.gateway.host}:{settings.gateway.port}",
            kafka=settings.bootstrap_servers,
            logs=str(settings.data_dir / "logs"),
        )
        if settings.trainer.model_path is None:
            logger().info("no_model", hint="set trainer.model_path=DIR to train and serve")
        await stop.wait()
        logger().info("stopping", hint="waiting until nothing is left in the topics")
        await installation.stop_in_order()
    finally:
        await installation.supervisor.stop_all()
        installation.supervisor.release()


def run(settings: Settings) -> None:
    """Entry point of `clawstream up`."""
    run_async("up", settings, main)

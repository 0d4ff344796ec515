"""Publish the worker's status on `claw.workers`: at every change, and as a heartbeat."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from clawstream.runtime.kafka import Cluster, KafkaError
from clawstream.runtime.logs import logger
from clawstream.runtime.process.readiness import not_ready, ready
from clawstream.runtime.topics.records import now_micros
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import WorkerState, WorkerStatus
from clawstream.schemas.settings import Settings

# A status that can't be sent is replaced by the next one, not sent late.
_SEND_TIMEOUT_MS = 5000
_ERROR_CHARACTERS = 2000


class Report:
    """The current status of the worker. `changed` wakes the reporter, which sends it at once."""

    def __init__(self, settings: Settings, base_url: str) -> None:
        self.changed = asyncio.Event()
        self.status = WorkerStatus(
            worker_id=settings.rollout.worker_id,
            base_url=base_url,
            models=(),
            state="starting",
            run_id=settings.run_id,
            heartbeat_at=0,
            heartbeat_interval_ms=int(settings.rollout.heartbeat_s * 1000),
            started_at=now_micros(),
            loads=0,
        )

    def engine_started(self) -> None:
        """Record a new engine: nothing is loaded, loads count from 0. Keeps the last error."""
        self.status = replace(self.status, started_at=now_micros(), loads=0, failed_loads=0)
        self.set_state("starting", None, self.status.error)

    def engine_serves(self, models: tuple[str, ...]) -> None:
        """Record the model names that the engine serves."""
        self.status = replace(self.status, models=models)

    def loaded(self, version_id: str, milliseconds: float) -> None:
        """Record a loaded version."""
        self.set_state("ready", version_id)
        self.status = replace(
            self.status,
            loads=self.status.loads + 1,
            last_load_ms=round(milliseconds, 3),
            loaded_at=now_micros(),
        )

    def load_failed(self, version_id: str | None, error: str) -> None:
        """Record a failed load. version_id: the version that serves on, None for none."""
        self.status = replace(self.status, failed_loads=self.status.failed_loads + 1)
        state = self.status.state
        self.set_state("starting" if state == "loading" else state, version_id, error)

    def set_state(
        self, state: WorkerState, version_id: str | None, error: str | None = None
    ) -> None:
        """Set the state, the served version (None: boot weights or none) and the last error.

        Another version than before has no time of loading: another worker has loaded it.
        """
        error = error[:_ERROR_CHARACTERS] if error else None
        loaded_at = self.status.loaded_at if version_id == self.status.weight_version else None
        self.status = replace(
            self.status,
            state=state,
            weight_version=version_id,
            error=error,
            loaded_at=loaded_at,
        )
        self.changed.set()


class Reporter:
    """Send the report.

    If Kafka is unavailable, the engine serves on; the next heartbeat retries.
    """

    def __init__(self, cluster: Cluster, settings: Settings, report: Report) -> None:
        self._producer = cluster.producer(message_timeout_ms=_SEND_TIMEOUT_MS)
        self._topic = settings.kafka.topics.workers
        self._heartbeat_s = settings.rollout.heartbeat_s
        self._report = report
        self._codec = Codec()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self._report.changed.clear()
            await self.send()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._report.changed.wait(), self._heartbeat_s)

    async def send(self) -> None:
        """Send the current report, and update the readiness of the process."""
        status = self._report.status
        what = f"engine {status.base_url}, {status.weight_version or 'boot weights'}"
        ready(what) if status.state == "ready" else not_ready(status.error or status.state)
        await self._send(self._codec.encode(replace(status, heartbeat_at=now_micros())))

    async def send_tombstone(self) -> None:
        """Send the tombstone of a clean exit. No record may follow it."""
        await self._send(None)

    def close(self) -> None:
        """Release the client."""
        self._producer.close(timeout_s=1.0)

    async def _send(self, value: bytes | None) -> None:
        try:
            await self._producer.send(self._topic, self._report.status.worker_id.encode(), value)
        except KafkaError as error:
            logger().warning("status_not_sent", error=str(error))

"""Keep an engine running, and the newest weight version loaded in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import aiohttp

from clawstream.rollout.errors import (
    EngineBroken,
    EngineChanged,
    EngineUnavailable,
    InvalidWeights,
)
from clawstream.rollout.server.load_weights import LoadResult, engine_label, load_version
from clawstream.rollout.server.process import AttachedServer, VllmServer, served_models
from clawstream.rollout.server.weight_files import remove_others
from clawstream.rollout.status import Report
from clawstream.rollout.versions import Versions
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.kafka import Fenced
from clawstream.runtime.logs import logger
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings

RETRY_S = 1.0
LABEL_CHECK_S = 5.0
"""Interval in seconds of checks for loads by another worker on the same engine."""
T = TypeVar("T")


class EngineSupervisor:
    """Start the engine, load the wanted version, and restart the engine when it ends or breaks.

    `_label` is the version label of the engine. `_loaded` is the label if the version is one of
    this run's, else None.
    """

    def __init__(
        self,
        settings: Settings,
        server: VllmServer | AttachedServer,
        http: aiohttp.ClientSession,
        versions: Versions,
        updated: asyncio.Event,
        report: Report,
    ) -> None:
        self._serve_base = settings.rollout.serve_base
        self._run_id = settings.run_id
        # A directory of this worker only, because the worker removes files that it needs no longer.
        # Absolute, because an attached engine has another working directory.
        data_dir = settings.data_dir.absolute()
        self._files = data_dir / "rollout" / settings.rollout.worker_id / "files"
        self._digests: tuple[str, ...] = ()  # of the files of the last version that was loaded
        self._server, self._http = server, http
        self._versions, self._updated = versions, updated
        self._report = report
        self._label = ""
        self._loaded: str | None = None

    async def run(self) -> None:
        """Keep the engine running until cancelled.

        Raises:
            ServerFailed: the engine does not start.
            Fenced: a worker of another run has taken the engine.
        """
        while True:
            self._report.engine_started()
            await self._server.start()
            seconds = await self._server.wait_ready(self._http)
            logger().info("engine_ready", base_url=self._server.base_url, seconds=round(seconds, 1))
            reason = await self._serve_until_it_ends()
            logger().error("engine_lost", base_url=self._server.base_url, reason=reason)
            self._report.set_state("starting", None, reason)
            await self._server.kill()
            await asyncio.sleep(RETRY_S)

    async def _serve_until_it_ends(self) -> str:
        """Return the reason of the engine's end."""
        serving = asyncio.create_task(self._serve())
        ended = asyncio.create_task(self._server.wait_ended(self._http))
        try:
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
            return await ended
        except EngineBroken as error:
            return str(error)
        finally:
            serving.cancel()
            ended.cancel()
            await asyncio.gather(serving, ended, return_exceptions=True)

    async def _serve(self) -> None:
        url = self._server.base_url
        models = await self._retry_until_answered(lambda: served_models(self._http, url))
        self._report.engine_serves(models)
        self._label, self._loaded = await self._engine_label(), None
        while True:
            self._updated.clear()
            version = self._versions.wanted(self._loaded)
            if version is None:
                await self._wait()
            elif version.version_id == self._label:
                # A previous worker, or another worker of this run on the same engine, loaded it.
                self._loaded = self._label
                self._report.set_state("ready", self._loaded)
            else:
                await self._load(version)

    async def _wait(self) -> None:
        """Wait for another wanted version, or for a load by another worker."""
        if self._loaded is None and self._serve_base and self._versions.complete:
            self._report.set_state("ready", None, self._report.status.error)
        wait_s = min(LABEL_CHECK_S, self._versions.next_retry_s() or LABEL_CHECK_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._updated.wait(), wait_s)
        self._apply_label(await self._engine_label())

    async def _engine_label(self) -> str:
        url = self._server.base_url
        return await self._retry_until_answered(lambda: engine_label(self._http, url))

    def _apply_label(self, label: str) -> None:
        """Take over a label that changed without a load by this worker.

        Raises:
            Fenced: the label belongs to another run. The most recent worker owns the engine.
        """
        before, self._label = self._label, label
        if label == before:
            return
        logger().warning("engine_label_changed", version=label, before=before)
        run_id, is_version, _ = label.rpartition("/")
        url = self._server.base_url
        if not is_version:  # it was restarted with its boot weights
            self._loaded = None
            self._report.set_state("loading", None, f"{url} lost {before}: it was started again")
        elif run_id != self._run_id:
            raise Fenced(
                f"{url} serves {label}: a worker of run {run_id} has taken this engine over; give "
                "each run an engine of its own"
            )
        else:
            self._loaded = label
            self._report.set_state("ready", label)

    async def _load(self, version: WeightVersion) -> None:
        """Load a version and report it.

        Raises:
            EngineBroken: the engine must be restarted.
            Fenced: a worker of another run has taken the engine.
        """
        name = version.version_id
        if self._report.status.state != "ready":
            self._report.set_state("loading", None, self._report.status.error)
        state = self._report.status.state
        try:
            result = await load_version(
                self._http,
                self._server.base_url,
                name,
                version.files,
                self._files,
                self._label,
                version.base_model,
            )
        except EngineChanged as error:
            self._apply_label(error.label)
        except (InvalidWeights, WeightsUnreadable) as error:
            await self._failed(version, error)
        except EngineUnavailable as error:
            logger().warning("version_not_loaded", version=name, error=str(error))
            self._report.set_state(state, self._loaded, str(error))
            await asyncio.sleep(RETRY_S)
            # The load may have succeeded although the answer is missing.
            self._apply_label(await self._engine_label())
        else:
            await self._succeeded(name, result)

    async def _failed(
        self, version: WeightVersion, error: InvalidWeights | WeightsUnreadable
    ) -> None:
        """Reject or defer a version and report it; remove what it left of no use on the disk."""
        name, kept = version.version_id, self._digests
        if isinstance(error, InvalidWeights):
            logger().error("version_rejected", version=name, error=str(error))
            self._versions.reject(name)
        else:
            logger().warning("version_deferred", version=name, error=str(error))
            self._versions.defer(name)
            kept += tuple(file.sha256 for file in version.files)
        self._report.load_failed(self._loaded, str(error))
        if self._digests:  # else the files of the loaded version are not known
            await asyncio.to_thread(remove_others, kept, None, self._files)

    async def _succeeded(self, name: str, result: LoadResult) -> None:
        self._label = self._loaded = name
        self._digests = result.digests
        self._report.loaded(name, result.total_ms)
        await asyncio.to_thread(remove_others, result.digests, result.held, self._files)
        logger().info(
            "version_loaded",
            version=name,
            verify_ms=round(result.verify_ms, 1),
            stage_ms=round(result.stage_ms, 1),
            pause_ms=round(result.pause_ms, 1),
        )

    async def _retry_until_answered(self, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request until the engine answers. Another task detects the engine's end."""
        while True:
            try:
                return await request()
            except EngineUnavailable as error:
                logger().warning("engine_did_not_answer", error=str(error))
                await asyncio.sleep(RETRY_S)

"""A rollout worker: keeps one vLLM server alive, brings it each new weight version, and says on
`claw.workers` how it is.

    starting  the engine starts, or has nothing to serve yet: no version exists and
        `rollout.serve_base` is off
    loading   the first version since the engine's start is being loaded
    ready     weights and label are both set. It stays so while newer versions are loaded, for the
    engine serves on.
    failed    the engine does not start; the process ends after saying so, and its supervisor starts
    it again
    draining  the worker is asked to stop: gateways send it no new calls, those in flight end; then
        the engine, then a tombstone

A killed engine comes up with its boot weights and the label "default": then the newest version is
loaded before `ready`. Of several versions that wait the newest is loaded. A version that is not
what it says is named in `error`, and the old one serves; one whose files can't be read at the
moment is tried again in a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import aiohttp

from rollout.errors import (
    EngineBroken,
    EngineChanged,
    EngineUnavailable,
    InvalidWeights,
    RolloutError,
    WeightsUnreadable,
)
from rollout.server.load_weights import engine_label, load_version
from rollout.server.process import WILDCARDS, AttachedServer, VllmServer, served_models
from rollout.server.weight_files import remove_others
from rollout.status import Report, Reporter
from rollout.versions import Versions, WeightsFeed
from runtime.kafka import Cluster, Fenced
from runtime.logs import logger
from runtime.process.lifecycle import run_async
from runtime.topics.records import cluster_of, create_topics
from schemas.errors import SettingsError
from schemas.records import WeightVersion
from schemas.settings import Settings

RETRY_S = 1.0
LABEL_CHECK_S = 5.0
"""How often the engine is asked whether another worker loaded something."""
T = TypeVar("T")


def public_url(settings: Settings, base_url: str) -> str:
    """The engine's URL as gateways are told.

    base_url: its own. Raises SettingsError when it is one that nobody else can call.
    """
    told = settings.rollout.public_url
    if told is not None:
        return told.rstrip("/").removesuffix("/v1")
    if settings.rollout.attach_url is None and settings.rollout.host in WILDCARDS:
        raise SettingsError(
            f"rollout.public_url: rollout.host={settings.rollout.host} is no address that can be "
            "called"
        )
    return base_url


def create_server(settings: Settings) -> VllmServer | AttachedServer:
    """The engine that the settings ask for.

    Raises SettingsError when they name neither a model nor a server.
    """
    if settings.rollout.attach_url is not None:
        return AttachedServer(settings.rollout.attach_url)
    model = settings.rollout.model_path or settings.trainer.model_path
    if model is None:
        raise SettingsError(
            "rollout.model_path: set it, or trainer.model_path, or rollout.attach_url"
        )
    if not (model / "config.json").is_file():
        raise SettingsError(f"rollout.model_path: {model} is no Hugging Face model directory")
    return VllmServer(
        settings.rollout,
        model,
        settings.data_dir / "logs" / f"vllm-{settings.rollout.worker_id}.log",
    )


class EngineSupervisor:
    """Owns the engine's life: starts it, follows the wanted version, and starts it again when it
    ended or broke.
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
        # Of this worker alone: it removes what it needs no longer.
        self._files = settings.data_dir / "rollout" / settings.rollout.worker_id / "files"
        self._server, self._http = server, http
        self._versions, self._updated = versions, updated
        self._report = report

    async def run(self) -> None:
        """Keep it up until cancelled. Raises ServerFailed when it does not start."""
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
        self._report.engine_serves(
            await self._retry_until_answered(
                lambda: served_models(self._http, self._server.base_url)
            )
        )
        label = await self._label()
        loaded: str | None = None
        while True:
            self._updated.clear()
            version = self._versions.wanted(loaded)
            if version is not None and version.version_id == label:
                # A worker before this one, or another one of this run on the same engine, loaded
                # it.
                loaded = label
                self._report.set_state("ready", loaded)
            elif version is not None:
                loaded, label = await self._load(version, loaded, label)
            else:
                if loaded is None and self._serve_base and self._versions.complete:
                    self._report.set_state("ready", None, self._report.status.error)
                wait_s = min(LABEL_CHECK_S, self._versions.next_retry_s() or LABEL_CHECK_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._updated.wait(), wait_s)
                loaded, label = await self._refresh_label(loaded, label)

    async def _refresh_label(self, loaded: str | None, label: str) -> tuple[str | None, str]:
        """Ask the engine what it serves; returns the loaded version and the label."""
        now = await self._label()
        return (loaded if now == label else self._changed(now, label)), now

    async def _label(self) -> str:
        return await self._retry_until_answered(
            lambda: engine_label(self._http, self._server.base_url)
        )

    def _changed(self, label: str, before: str) -> str | None:
        """Take notice that the engine's label changed without a load of ours; returns the loaded
        version.

        Raises:
            Fenced: The label is of another run. The worker that came last has the engine.
        """
        logger().warning("engine_label_changed", version=label, before=before)
        run_id, is_version, _ = label.rpartition("/")
        if not is_version:  # it was started again, with its boot weights
            self._report.set_state(
                "loading", None, f"{self._server.base_url} lost {before}: it was started again"
            )
            return None
        if run_id != self._run_id:
            raise Fenced(
                f"{self._server.base_url} serves {label}: a worker of run {run_id} has taken this "
                "engine over; "
                "give each run an engine of its own"
            )
        self._report.set_state("ready", label)
        return label

    async def _load(
        self, version: WeightVersion, loaded: str | None, label: str
    ) -> tuple[str | None, str]:
        """Load a version and say so; returns the loaded version and the engine's label.

        Raises EngineBroken, Fenced.
        """
        if self._report.status.state != "ready":
            self._report.set_state("loading", None, self._report.status.error)
        state = self._report.status.state
        try:
            if version.format != "full":
                raise InvalidWeights(
                    f"{version.version_id} is a {version.format}: only full versions can be loaded"
                )
            result = await load_version(
                self._http,
                self._server.base_url,
                version.version_id,
                version.files,
                self._files,
                label,
            )
        except EngineChanged as error:
            return self._changed(error.label, label), error.label
        except InvalidWeights as error:
            logger().error("version_rejected", version=version.version_id, error=str(error))
            self._versions.reject(version.version_id)
            self._report.set_state("starting" if state == "loading" else state, loaded, str(error))
            return loaded, label
        except WeightsUnreadable as error:
            logger().warning("version_deferred", version=version.version_id, error=str(error))
            self._versions.defer(version.version_id)
            self._report.set_state("starting" if state == "loading" else state, loaded, str(error))
            return loaded, label
        except EngineUnavailable as error:
            logger().warning("version_not_loaded", version=version.version_id, error=str(error))
            self._report.set_state(state, loaded, str(error))
            await asyncio.sleep(RETRY_S)
            # The load may have been done all the same.
            return await self._refresh_label(loaded, label)
        self._report.loaded(version.version_id, result.total_ms)
        await asyncio.to_thread(remove_others, version.files, self._files)
        logger().info(
            "version_loaded",
            version=version.version_id,
            verify_ms=round(result.verify_ms, 1),
            stage_ms=round(result.stage_ms, 1),
            pause_ms=round(result.pause_ms, 1),
        )
        return version.version_id, version.version_id

    async def _retry_until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until the engine answers; its end is noticed elsewhere."""
        while True:
            try:
                return await ask()
            except EngineUnavailable as error:
                logger().warning("engine_did_not_answer", error=str(error))
                await asyncio.sleep(RETRY_S)


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Work until `stop` is set.

    Raises SettingsError, or RolloutError when the engine does not start.
    """
    server = create_server(settings)
    cluster: Cluster = cluster_of(settings)
    await asyncio.to_thread(create_topics, cluster, settings)
    report = Report(settings, public_url(settings, server.base_url))
    versions, updated = Versions(settings.run_id), asyncio.Event()
    reporter = Reporter(cluster, settings, report)
    feed = WeightsFeed(cluster, settings.kafka.topics, versions, updated)
    async with aiohttp.ClientSession() as http:
        supervisor = EngineSupervisor(settings, server, http, versions, updated, report)
        reporting, keeping = (
            asyncio.create_task(reporter.run()),
            asyncio.create_task(supervisor.run()),
        )
        stopping = asyncio.create_task(_none_of(stop.wait()))
        work: set[asyncio.Future[None]] = {keeping, feed.start(), reporting, stopping}
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                await ended
            await _cancel(keeping)  # no version is loaded any more
            report.set_state("draining", report.status.weight_version)
            await reporter.send()
            await server.drain(http, settings.rollout_drain_timeout_s)
            await _cancel(reporting)
        except (RolloutError, Fenced) as error:
            await _cancel(reporting)
            report.set_state("failed", None, str(error))
            await reporter.send()
            raise
        finally:
            feed.stop()
            await _cancel(*work)
            await server.stop()
        await reporter.send_tombstone()
        reporter.close()


async def _none_of(wait: Awaitable[object]) -> None:
    await wait


async def _cancel(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main(settings: Settings) -> None:
    """Entry of the process. Never returns."""
    run_async("rollout", settings, run)

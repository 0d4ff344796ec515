"""A rollout worker: keep one vLLM server alive, load each new weight version, report its state.

The worker reports these states on `claw.workers`:

    starting  the engine is starting, or serves nothing yet: no version exists and
              `rollout.serve_base` is off
    loading   the first version since the engine's start is being loaded
    ready     weights and label are both set; the state stays while newer versions are loaded,
              because the engine continues to serve
    failed    the engine does not start; the process reports this, ends, and is restarted by its
              supervisor
    draining  the worker was asked to stop: gateways send it no new calls and the calls in flight
              finish; then the engine stops, and the worker sends a tombstone

A restarted engine has its boot weights and the label "default"; the newest version is loaded before
the state becomes `ready`. Of several waiting versions only the newest is loaded. `error` names an
invalid version, and the old one stays in service. A version with unreadable files is tried again
later.
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
"""Interval in seconds of checks for loads by another worker on the same engine."""
T = TypeVar("T")


def public_url(settings: Settings, base_url: str) -> str:
    """Return the engine's URL for gateways.

    Args:
        settings: `rollout.public_url` overrides the engine's own URL.
        base_url: the engine's own URL.

    Raises:
        SettingsError: other hosts cannot call the URL.
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
    """Return the engine that the settings configure.

    Raises:
        SettingsError: the settings name neither a usable model nor a server.
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
    """Start the engine, load the wanted version, and restart the engine when it ends or breaks."""

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
        self._files = settings.data_dir / "rollout" / settings.rollout.worker_id / "files"
        self._server, self._http = server, http
        self._versions, self._updated = versions, updated
        self._report = report

    async def run(self) -> None:
        """Keep the engine running until cancelled.

        Raises:
            ServerFailed: the engine does not start.
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
                # A previous worker, or another worker of this run on the same engine, loaded it.
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
        """Read the engine's label; return the loaded version and the label."""
        now = await self._label()
        return (loaded if now == label else self._changed(now, label)), now

    async def _label(self) -> str:
        return await self._retry_until_answered(
            lambda: engine_label(self._http, self._server.base_url)
        )

    def _changed(self, label: str, before: str) -> str | None:
        """Record that the engine's label changed without a load by this worker.

        Returns:
            The loaded version.

        Raises:
            Fenced: the label belongs to another run. The most recent worker owns the engine.
        """
        logger().warning("engine_label_changed", version=label, before=before)
        run_id, is_version, _ = label.rpartition("/")
        if not is_version:  # it was restarted with its boot weights
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
        """Load a version and report it; return the loaded version and the engine's label.

        Raises:
            EngineBroken: the engine must be restarted.
            Fenced: a worker of another run has taken the engine.
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
            # The load may have succeeded although the answer is missing.
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
        """Repeat a request until the engine answers. Another task detects the engine's end."""
        while True:
            try:
                return await ask()
            except EngineUnavailable as error:
                logger().warning("engine_did_not_answer", error=str(error))
                await asyncio.sleep(RETRY_S)


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Run the worker until `stop` is set.

    Raises:
        SettingsError: the settings do not describe an engine.
        RolloutError: the engine does not start.
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
            await _cancel(keeping)  # no version is loaded after this line
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
    """Run the process. Never returns."""
    run_async("rollout", settings, run)

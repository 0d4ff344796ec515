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
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from clawstream.rollout.engine_supervisor import EngineSupervisor
from clawstream.rollout.errors import RolloutError
from clawstream.rollout.metrics import WorkerMetrics
from clawstream.rollout.server.process import WILDCARDS, AttachedServer, VllmServer
from clawstream.rollout.status import Report, Reporter
from clawstream.rollout.versions import Versions, WeightsFeed
from clawstream.runtime.kafka import Cluster, Fenced
from clawstream.runtime.process.lifecycle import run_async
from clawstream.runtime.process.metrics import serving_metrics
from clawstream.runtime.topics.access import check_access
from clawstream.runtime.topics.records import cluster_of, create_topics
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings


def public_url(settings: Settings, base_url: str) -> str:
    """Return the engine's URL for gateways.

    Args:
        settings: `rollout.public_url` overrides the engine's own URL.
        base_url: the engine's own URL.

    Raises:
        SettingsError: other hosts cannot call the URL.
    """
    configured = settings.rollout.public_url
    if configured is not None:
        return configured.rstrip("/").removesuffix("/v1")
    if not settings.rollout.attach_urls and settings.rollout.host in WILDCARDS:
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
    if settings.rollout.workers > 1:
        raise SettingsError(
            f"rollout.workers={settings.rollout.workers}: `clawstream up` starts several workers; "
            "this is one. Give it a rollout.worker_id and a rollout.port of its own"
        )
    if settings.rollout.attach_urls:
        return AttachedServer(settings.rollout.attach_urls[0])
    model = settings.rollout.model_path or settings.trainer.model_path
    if model is None:
        raise SettingsError(
            "rollout.model_path: set it, or trainer.model_path, or rollout.attach_urls"
        )
    if not (model / "config.json").is_file():
        raise SettingsError(f"rollout.model_path: {model} is no Hugging Face model directory")
    return VllmServer(
        settings.rollout,
        model,
        settings.data_dir / "logs" / f"vllm-{settings.rollout.worker_id}.log",
        settings.trainer.lora.rank,
    )


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Run the worker until `stop` is set.

    Raises:
        SettingsError: the settings do not describe an engine.
        RolloutError: the engine does not start.
    """
    server = create_server(settings)
    cluster = cluster_of(settings)
    await asyncio.to_thread(create_topics, cluster, settings)
    await asyncio.to_thread(check_access, cluster, settings, "rollout")
    report = Report(settings, public_url(settings, server.base_url))
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(report))
    with serving_metrics(settings, "rollout", registry):
        await _work(settings, stop, cluster, server, report)


async def _work(
    settings: Settings,
    stop: asyncio.Event,
    cluster: Cluster,
    server: VllmServer | AttachedServer,
    report: Report,
) -> None:
    versions, updated = Versions(settings.run_id), asyncio.Event()
    reporter = Reporter(cluster, settings, report)
    feed = WeightsFeed(cluster, settings.kafka.topics, versions, updated)
    async with aiohttp.ClientSession() as http:
        supervisor = EngineSupervisor(settings, server, http, versions, updated, report)
        supervising = asyncio.create_task(supervisor.run())
        reporting = asyncio.create_task(reporter.run())
        stopping = asyncio.create_task(stop.wait())
        tasks: set[asyncio.Future[Any]] = {supervising, reporting, stopping, feed.start()}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                await ended
            await _cancel(supervising)  # no version is loaded after this line
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
            await _cancel(*tasks)
            await server.stop()
        await reporter.send_tombstone()
        reporter.close()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main(settings: Settings) -> None:
    """Run the process. Never returns."""
    run_async("rollout", settings, run)

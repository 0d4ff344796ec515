"""The rollout worker on a real Kafka with a stand-in engine.

The stand-in serves the routes that a worker calls. Tests make it die, come back empty and fail in
the middle of a swap, as often as needed. test_rollout_engine.py uses a real vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clawstream.rollout.main import run
from clawstream.rollout.vllm_plugin.weight_loader import BROKEN, CHANGED, PATH
from clawstream.runtime.kafka import Cluster, Fenced
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import WeightFile, WeightVersion, WorkerStatus
from clawstream.schemas.settings import Settings

HEARTBEAT_S = 0.2


class StandIn:
    """The routes that a worker calls. `label` is the label that the engine reports."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.break_next_swap = False
        self.hold_updates = asyncio.Event()
        self.hold_updates.set()
        self._site: web.TCPSite | None = None
        self.port = 0
        self.label = "default"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get(PATH, self._info)
        app.router.add_post(PATH, self._load)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def die(self) -> None:
        """End the engine and drop its state; the port stays reserved."""
        await self._runner.cleanup()
        self.label = "default"

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy"}]})

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _load(self, request: web.Request) -> web.Response:
        await self.hold_updates.wait()
        asked = await request.json()
        if asked["served"] != self.label:
            return web.json_response({"weight_version": self.label}, status=CHANGED)
        if self.break_next_swap:
            self.break_next_swap = False
            # the test sees the broken state, however soon the worker retries
            self.hold_updates.clear()
            return web.json_response({"error": "in pieces"}, status=BROKEN)
        self.label = asked["version_id"]
        self.loads.append(self.label)
        return web.json_response({"weight_version": self.label, "stage_ms": 1.0, "pause_ms": 1.0})


class Bench:
    """A worker on its stand-in engine, and its two topics."""

    def __init__(self, settings: Settings, cluster: Cluster, work: Path) -> None:
        self.engine = StandIn()
        self.work = work
        self._codec, self._cluster = Codec(), cluster
        self._topics = settings.kafka.topics
        self._settings = settings
        self._producer = cluster.producer()
        create_topics(cluster, settings)

    @asynccontextmanager
    async def worker(self, **more: Any) -> Any:
        """Run a worker within the block; it must end cleanly."""
        await self.engine.start()
        rollout = {
            "attach_urls": [f"http://127.0.0.1:{self.engine.port}/v1"],
            "worker_id": "w",
            "heartbeat_s": HEARTBEAT_S,
            **more,
        }
        settings = self._settings.model_copy(
            update={"run_id": "ours", "rollout": self._settings.rollout.model_validate(rollout)}
        )
        stop = asyncio.Event()
        task = asyncio.create_task(run(settings, stop))
        try:
            yield task
        finally:
            stop.set()
            try:
                await asyncio.wait_for(task, 180)
            finally:
                await self.engine.die()

    def publish(self, run_id: str, index: int, *, damaged: bool = False) -> str:
        version_id = f"{run_id}/{index}.0"
        path = self.work / f"{run_id}-{index}.safetensors"
        path.write_bytes(version_id.encode())
        digest = "0" * 64 if damaged else hashlib.sha256(version_id.encode()).hexdigest()
        file = WeightFile(url=path.as_uri(), sha256=digest, size_bytes=len(version_id))
        version = WeightVersion(
            version_id=version_id,
            run_id=run_id,
            sync_index=index,
            attempt=0,
            format="full",
            files=(file,),
            channel="train",
            metrics={},
            created_at=0,
        )
        self._producer.put(self._topics.weights, version_id.encode(), self._codec.encode(version))
        self._producer.flush()
        return version_id

    def publish_rubbish(self) -> None:
        """Publish an unreadable record.

        The worker logs it as unreadable; then it has read everything published before.
        """
        self._producer.put(self._topics.weights, b"rubbish", b"rubbish")
        self._producer.flush()

    def said(self) -> list[WorkerStatus | None]:
        """Return all records of the workers topic; None is a tombstone."""
        records = self._cluster.read_all(self._topics.workers)
        return [
            None if record.value is None else self._codec.decode(record.value) for record in records
        ]

    async def until(
        self, condition: Callable[[WorkerStatus | None], bool], timeout_s: float = 120
    ) -> list[Any]:
        """Wait until the last record meets the condition; return all records."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            said = await asyncio.to_thread(self.said)
            if said and condition(said[-1]):
                return said
            assert asyncio.get_running_loop().time() < deadline, (
                said[-1] if said else "nothing said"
            )
            await asyncio.sleep(0.05)

    async def serves(self, version_id: str) -> WorkerStatus:
        said = await self.until(
            lambda s: s is not None and s.state == "ready" and s.weight_version == version_id
        )
        status: WorkerStatus = said[-1]
        return status


@pytest.fixture
def bench(settings: Settings, cluster: Cluster, tmp_path: Path) -> Callable[[], Bench]:
    return lambda: Bench(settings, cluster, tmp_path)


def states(said: list[WorkerStatus | None]) -> list[tuple[str, str | None]]:
    """Return the state changes in order, without states that may end before they are published."""
    steps = [("gone", None) if s is None else (s.state, s.weight_version) for s in said]
    steps = [step for step in steps if step[0] not in ("loading", "draining")]
    return [step for i, step in enumerate(steps) if i == 0 or step != steps[i - 1]]


def test_from_nothing_to_ready_to_gone(bench: Callable[[], Bench]) -> None:
    async def scenario() -> None:
        b = bench()
        async with b.worker():
            await b.until(lambda s: s is not None and s.state == "starting")
            b.publish("theirs", 5)
            seen = len(await asyncio.to_thread(b.said))
            said = await b.until(lambda s: True)
            # A few heartbeats: another run's version must not make the worker ready.
            while len(said) < seen + 4:
                said = await b.until(lambda s: True)
            assert {s.state for s in said if s} == {"starting"}
            first = b.publish("ours", 0)
            status = await b.serves(first)
            assert (status.loads, status.models, status.run_id, status.error) == (
                1,
                ("policy",),
                "ours",
                None,
            )
            assert status.base_url == f"http://127.0.0.1:{b.engine.port}"
            assert status.last_load_ms is not None and status.heartbeat_interval_ms == 200
            assert status.loaded_at is not None and status.loaded_at <= status.heartbeat_at
            second = b.publish("ours", 1)
            later = await b.serves(second)
            assert later.loads == 2 and (later.loaded_at or 0) > status.loaded_at
        said = b.said()
        assert states(said) == [
            ("starting", None), ("ready", first), ("ready", second), ("gone", None)
        ]  # fmt: skip
        assert b.engine.loads == [first, second]

    asyncio.run(scenario())


def test_of_several_waiting_versions_the_newest_is_loaded(
    bench: Callable[[], Bench], capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        b = bench()
        for index in range(3):
            b.publish("ours", index)
        async with b.worker():
            await b.serves("ours/2.0")
            b.engine.hold_updates.clear()
            for index in range(3, 8):
                b.publish("ours", index)
            b.publish_rubbish()
            # the worker reads all of them while the engine is busy with the first
            async with asyncio.timeout(60):
                while (  # noqa: ASYNC110 - a thread logs
                    "weight_version_unreadable" not in "".join(capsys.readouterr())
                ):
                    await asyncio.sleep(0.05)
            b.engine.hold_updates.set()
            await b.serves("ours/7.0")
        # One of the five was being staged when the others came.
        assert (b.engine.loads[0], b.engine.loads[-1]) == ("ours/2.0", "ours/7.0")
        assert len(b.engine.loads) <= 3

    asyncio.run(scenario())


def test_a_bad_version_is_named_and_the_old_one_serves(bench: Callable[[], Bench]) -> None:
    async def scenario() -> None:
        b = bench()
        b.publish("ours", 0)
        b.publish("ours", 1, damaged=True)
        async with b.worker():
            # The engine served nothing yet, so the newest valid version is loaded.
            assert (await b.serves("ours/0.0")).loads == 1
            b.publish("ours", 2, damaged=True)
            said = await b.until(
                lambda s: s is not None and s.error is not None and "ours-2" in s.error
            )
            assert (said[-1].state, said[-1].weight_version) == ("ready", "ours/0.0")
            assert said[-1].failed_loads >= 2
            b.publish("ours", 3)
            assert (await b.serves("ours/3.0")).error is None
        assert b.engine.loads == ["ours/0.0", "ours/3.0"]

    asyncio.run(scenario())


def test_a_dead_engine_that_comes_back_is_loaded_before_it_is_ready(
    bench: Callable[[], Bench],
) -> None:
    async def scenario() -> None:
        b = bench()
        b.publish("ours", 4)
        async with b.worker():
            await b.serves("ours/4.0")
            await b.engine.die()
            said = await b.until(lambda s: s is not None and s.state == "starting")
            assert "stopped answering" in said[-1].error
            b.publish("ours", 5)
            await b.engine.start()
            status = await b.serves("ours/5.0")
            assert status.loads == 1
        assert states(b.said()) == [
            ("starting", None), ("ready", "ours/4.0"), ("starting", None), ("ready", "ours/5.0"),
            ("gone", None)
        ]  # fmt: skip

    asyncio.run(scenario())


def test_a_swap_that_broke_is_not_served(bench: Callable[[], Bench]) -> None:
    async def scenario() -> None:
        b = bench()
        b.publish("ours", 0)
        async with b.worker():
            await b.serves("ours/0.0")
            b.engine.break_next_swap = True
            b.publish("ours", 1)
            said = await b.until(
                lambda s: s is not None and s.error is not None and "put into its model" in s.error
            )
            assert said[-1].state in ("starting", "loading")
            b.engine.hold_updates.set()
            await b.serves("ours/1.0")

    asyncio.run(scenario())


def test_a_worker_takes_over_an_engine_that_another_left(bench: Callable[[], Bench]) -> None:
    async def scenario() -> None:
        b = bench()
        version = b.publish("ours", 0)
        b.engine.label = version
        async with b.worker():
            status = await b.serves(version)
            assert status.loads == 0
            b.publish("ours", 1)
            assert (await b.serves("ours/1.0")).loads == 1

    asyncio.run(scenario())


def test_two_workers_of_a_run_on_one_engine_agree(bench: Callable[[], Bench]) -> None:
    async def scenario() -> None:
        b = bench()
        b.publish("ours", 0)
        async with b.worker():
            await b.serves("ours/0.0")
            # The other worker was faster: its loaded version is neither loaded again nor
            # relabelled.
            b.engine.label = "ours/1.0"
            b.publish("ours", 1)
            assert (await b.serves("ours/1.0")).loads == 1
        assert b.engine.loads == ["ours/0.0"]

    asyncio.run(scenario())


def test_a_worker_whose_engine_was_taken_over_by_another_run_ends(
    bench: Callable[[], Bench],
) -> None:
    async def scenario() -> None:
        b = bench()
        b.publish("ours", 0)
        with pytest.raises(Fenced, match="a worker of run theirs has taken this engine over"):
            async with b.worker() as task:
                await b.serves("ours/0.0")
                b.engine.label = "theirs/7.0"
                b.publish("ours", 1)
                await asyncio.wait({task}, timeout=120)
                assert task.done()
        assert b.engine.loads == ["ours/0.0"]
        last = b.said()[-1]
        assert last is not None and last.state == "failed" and "theirs" in str(last.error)

    asyncio.run(scenario())


def test_boot_weights_are_served_on_request(bench: Callable[[], Bench]) -> None:
    async def scenario() -> None:
        b = bench()
        async with b.worker(serve_base=True):
            said = await b.until(lambda s: s is not None and s.state == "ready")
            assert said[-1].weight_version is None
            b.publish("ours", 0)
            await b.serves("ours/0.0")

    asyncio.run(scenario())

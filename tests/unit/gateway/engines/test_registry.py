"""The state of engines over real sockets: kinds, circuits, probes, loading, draining."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.ports import free_port
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script
from support.wire import (
    ASK,
    BUSY,
    HI,
    LIMITED,
    OK,
    SOON_S,
    Answer,
    Rig,
    Wire,
    as_text,
    key_of,
    run,
    saying,
    wired,
)

from clawstream.gateway.engines.engine import Engine
from clawstream.gateway.engines.http1 import Address, Pool
from clawstream.gateway.engines.prober import MAX_UNCLEAR
from clawstream.gateway.engines.registry import EngineSpec, eligible
from clawstream.gateway.errors import NoEngine, UpstreamFailed
from clawstream.gateway.protocols.base import EngineKind
from clawstream.schemas.records import WorkerStatus

both_event_loops = pytest.mark.usefixtures("each_event_loop")
"""For the end of connections; probing and states are the same on both."""
PATIENT_S = 4.0
"""Probe interval that a busy machine keeps: a probe may take twice as long before it fails."""


def test_kinds_are_found_and_only_ours_are_asked_to_capture() -> None:
    async def body() -> None:
        for kind in ("captured", "vllm", "text"):
            engine = ScriptedEngine(lambda _: Script([HI]), kind)
            async with engine.serve() as url, Rig([url], probe_interval_s=PATIENT_S) as rig:
                await rig.until(lambda: rig.engines.ready)
                assert [w.kind for w in rig.engines.ready] == [kind]
                bodies = lambda worker: (  # noqa: E731
                    json.dumps(ASK | {"kind": worker.kind}).encode()
                )
                async with rig.call(
                    "POST", "/v1/chat/completions", bodies, {"content-type": "application/json"},
                    key="k", run_id="r", model="policy",
                ) as response:  # fmt: skip
                    assert response.status == 200 and response.spec.kind == kind
                    assert (response.header("content-type") or "").startswith("application/json")
                    await response.read()
                assert engine.requests[0]["kind"] == kind
                sent = {k.lower(): v for k, v in engine.headers[0].items()}
                assert ("x-clawstream-capture" in sent) == (kind == "captured")

    asyncio.run(body())


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "found"])
@pytest.mark.parametrize(
    ("kind", "advice"),
    [("captured", None), ("vllm", "Use chat or completions"), ("text", "text only")],
)
def test_an_engine_that_tells_no_tokens_is_announced(
    kind: EngineKind, advice: str | None, listed: bool
) -> None:
    async def body() -> list[str]:
        engine = ScriptedEngine(lambda _: Script([HI]), kind)
        async with engine.serve() as url:
            upstream = {"url": url, "kind": kind} if listed else url
            with capture_logs() as logs:
                async with Rig([upstream], probe_interval_s=PATIENT_S) as rig:
                    await rig.until(lambda: rig.engines.ready)
        return [line["do"] for line in logs if line["event"] == "engine_tells_no_tokens"]

    said = asyncio.run(body())
    assert len(said) == (advice is not None) and all(
        advice in line for line in said if advice is not None
    )


@both_event_loops
def test_an_engine_that_is_away_is_passed_over_at_once_and_comes_back() -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            here = await stack.enter_async_context(wired(saying(OK)))
            engine = ScriptedEngine(lambda _: Script([HI]))
            async with engine.serve(port := free_port()) as there:
                upstreams = [{"url": here, "kind": "text"}, there]
                # The engine counts as away after a probe at this interval.
                rig = await stack.enter_async_context(Rig(upstreams, probe_interval_s=1.0))
                await rig.until(lambda: len(rig.engines.ready) == 2)
                key = key_of(there, rig)
            assert await rig.ask(key) == (200, b"hi")
            await rig.until(lambda: rig.engines.states()[there] == "open")
            assert [w.base_url for w in rig.engines.ready] == [here]
            assert rig.count("engine_outages_total") == 1 and rig.count("engines{") == 2
            async with engine.serve(port):
                await rig.until(lambda: len(rig.engines.ready) == 2)
                assert (await rig.ask(key, model="x"))[0] == 404  # the same engine serves again

    asyncio.run(body())


def test_a_provider_that_failed_is_tried_by_one_call() -> None:
    failing, requests, go_on = [True], [], asyncio.Event()

    async def answer(wire: Wire, request: bytes) -> bool | None:
        requests.append(request)
        if failing[0]:
            wire.die()
            return True
        await go_on.wait()
        await wire.say(OK)
        return None

    async def test(url: str) -> None:
        async with Rig(as_text(url)) as rig:
            for _ in range(2):
                with pytest.raises(UpstreamFailed):
                    await rig.ask()
            await rig.until(lambda: rig.engines.states()[url] == "open")
            failing[0], before = False, len(requests)
            calls = [asyncio.create_task(rig.ask(f"k{i}")) for i in range(10)]
            await rig.until(lambda: rig.engines.states()[url] == "half_open")
            await rig.until(lambda: len(requests) > before)
            assert len(requests) == before + 1 and rig.count("waiting") == 9
            go_on.set()
            assert {await call for call in calls} == {(200, b"hi")}
            assert rig.engines.states()[url] == "ready" and rig.count("waiting") == 0

    run(answer, test=test)


def test_an_engine_that_hangs_is_noticed_by_probes() -> None:
    hangs = [False]

    async def answer(wire: Wire, _: bytes) -> bool | None:
        if hangs[0]:
            await asyncio.sleep(SOON_S)
        await wire.say(OK)
        return None

    async def test(url: str) -> None:
        async with Rig([{"url": url, "kind": "vllm"}]) as rig:
            assert await rig.ask() == (200, b"hi")
            hangs[0] = True
            await rig.until(lambda: not rig.engines.ready)
            hangs[0] = False
            assert await rig.ask() == (200, b"hi")

    run(answer, test=test)


def heard(url: str, state: Any) -> WorkerStatus:
    return WorkerStatus(
        worker_id="w", base_url=url, models=(), state=state, heartbeat_at=0,
        heartbeat_interval_ms=1000, started_at=0, loads=0,
    )  # fmt: skip


def test_calls_wait_while_weights_load_and_go_on_at_once() -> None:
    async def body() -> None:
        engine = ScriptedEngine(lambda _: Script([HI]))
        async with engine.serve() as url, Rig([], probe_interval_s=PATIENT_S) as rig:
            rig.registry.update("w", heard(url, "loading"), 0.0)
            calls = [asyncio.create_task(rig.ask(f"k{i}")) for i in range(20)]
            await rig.until(lambda: rig.count("waiting") == 20)
            assert rig.engines.states() == {"w": "loading"} and rig.count("engines{") == 1
            rig.registry.update("w", heard(url, "ready"), 0.0)
            assert {status for status, _ in await asyncio.gather(*calls)} == {404}
            assert {w and w.worker_id for w in rig.asked} == {"w"}
            assert rig.count("waiting") == 0

    asyncio.run(body())


@pytest.mark.parametrize("says", [b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n", LIMITED, b""])
def test_what_never_says_its_kind_is_a_provider_until_it_does(says: bytes) -> None:
    well = asyncio.Event()

    async def answer(wire: Wire, request: bytes) -> bool | None:
        if request.startswith(b"POST"):
            await wire.say(OK)
        elif well.is_set():
            await wire.say(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"version":"1"}')
        else:
            await wire.say(says)
        return None

    async def test(url: str) -> None:
        async with Rig([url]) as rig:
            assert await rig.ask() == (200, b"hi")
            assert [w.kind for w in rig.engines.ready] == ["text"]
            well.set()
            await rig.until(lambda: [w.kind for w in rig.engines.ready] == ["vllm"])

    run(answer, test=test)


def test_what_is_not_up_yet_is_no_provider() -> None:
    """Behind a proxy, a loading engine replies 503; a reporting worker is never a provider."""
    probes = Counter[bytes]()

    def always(says: bytes) -> Answer:
        async def answer(wire: Wire, request: bytes) -> bool | None:
            probes[says] += b"/version" in request
            await wire.say(says)
            return None

        return answer

    async def test(busy: str, limited: str) -> None:
        async with (
            Rig([busy], probe_interval_s=0.2) as proxied,
            Rig([], probe_interval_s=0.2) as reporting,
        ):
            reporting.registry.update("w", heard(limited, "ready"), 0.0)
            _ = proxied.engines.ready, reporting.engines.ready
            await proxied.until(lambda: min(probes[BUSY], probes[LIMITED]) > 2 * MAX_UNCLEAR)
            assert proxied.engines.ready == reporting.engines.ready == []

    run(always(BUSY), always(LIMITED), test=test)


def test_a_host_that_cannot_be_looked_up_is_an_engine_that_is_away() -> None:
    async def body() -> None:
        async with Rig(as_text("http://h"), worker_wait_s=0.1) as rig:
            engine = rig.engines.pick("k", ("r", None), ())
            assert engine is not None
            engine.pool = Pool(Address("a..b", 80, False, ""))
            with pytest.raises(NoEngine, match="cannot be reached"):
                await rig.ask()

    asyncio.run(body())


def test_a_probe_that_breaks_is_told_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(url: str) -> None:
        on_state_change, again = 0, asyncio.Event()

        def judge(_: Engine) -> None:
            nonlocal on_state_change
            on_state_change += 1
            if on_state_change == 1:
                raise RuntimeError("a bug")
            again.set()

        engine = Engine(EngineSpec("w", url), asyncio.get_running_loop().time, 0.05, judge)
        engine.watch()
        async with asyncio.timeout(SOON_S):
            await engine.prober.first_probe.wait()
            while "a bug" not in "".join(capsys.readouterr()):  # noqa: ASYNC110 - reads the log
                await asyncio.sleep(0.005)
            engine.failed("probe", surely=True)
            await again.wait()
            # The engine is probed again.
            while engine.state != "ready":  # noqa: ASYNC110 - the probing task sets the state
                await asyncio.sleep(0.005)
        await engine.close()

    run(saying(OK), test=test)


def test_waiting_ends_and_says_why() -> None:
    async def body() -> None:
        async with Rig([], worker_wait_s=0.05) as rig:
            with pytest.raises(NoEngine, match="none is known"):
                await rig.ask()
            rig.registry.update("w", heard("http://127.0.0.1:1", "loading"), 0.0)
            with pytest.raises(NoEngine, match="1 loading"):
                await rig.ask()
            call = asyncio.create_task(rig.ask())
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert rig.count("waiting") == 0 and rig.asked == []

    asyncio.run(body())


@both_event_loops
@pytest.mark.parametrize("how", ["draining", "tombstone", "removed"])
def test_a_draining_engine_ends_its_calls_and_gets_no_new_ones(how: str) -> None:
    gate, arrived = asyncio.Event(), asyncio.Event()

    async def answer(wire: Wire, request: bytes) -> bool | None:
        if request.startswith(b"POST"):
            arrived.set()
            await wire.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nh")
            await gate.wait()
            await wire.say(b"i")
        else:
            await wire.say(OK)
        return None

    async def test(old: str, new: str) -> None:
        async with Rig([] if how != "removed" else as_text(old), probe_interval_s=PATIENT_S) as rig:
            if how != "removed":
                rig.registry.update("w", heard(old, "ready"), 0.0)
            call = asyncio.create_task(rig.ask())
            await arrived.wait()
            if how == "removed":
                rig.registry.configure(as_text(new))  # type: ignore[arg-type]
            else:
                rig.registry.update("w", heard(old, "draining") if how == "draining" else None, 0.0)
                rig.registry.configure(as_text(new))  # type: ignore[arg-type]
            assert await rig.ask() == (200, b"hi")
            assert rig.asked[-1] is not None and rig.asked[-1].base_url == new and not call.done()
            gate.set()
            assert await call == (200, b"hi")

    run(answer, saying(OK), test=test)


OPEN = EngineSpec("open", "http://a")
JUDGE = EngineSpec("judge", "http://b", models=("judge",), model_map={"gpt": "judge"})
WORKER = EngineSpec("worker", "http://c", worker_id="w", models=("policy",), run_id="r")


@pytest.mark.parametrize(
    ("engines", "model", "expected"),
    [
        ([OPEN, JUDGE], None, [OPEN]),
        ([OPEN, JUDGE], "judge", [OPEN, JUDGE]),
        ([OPEN, JUDGE], "gpt", [OPEN, JUDGE]),
        ([OPEN, JUDGE], "x", [OPEN]),
        ([JUDGE, WORKER], None, [WORKER]),
        ([JUDGE, WORKER], "policy", [WORKER]),
        ([JUDGE], None, [JUDGE]),
        ([JUDGE, WORKER], "x", [JUDGE, WORKER]),
    ],
)
def test_an_engine_with_a_list_of_models_serves_only_these(
    engines: list[EngineSpec], model: str | None, expected: list[EngineSpec]
) -> None:
    assert eligible(engines, "r", model) == expected

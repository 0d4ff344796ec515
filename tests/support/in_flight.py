"""Weight versions that are loaded while calls are in flight, and the tokens of these calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.engine import Engine, Sampled, chat, logprobs_of, manifest, request, spans_cover, worst

from clawstream.rollout.server.load_weights import LoadResult, engine_label, load_version

CLIENTS = 16


async def counted(engine: Engine, metric: str) -> float:
    """Return a metric of the engine."""
    async with engine.http.get(f"{engine.url}/metrics") as reply:
        lines = [line for line in (await reply.text()).splitlines() if line.startswith(metric)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def reloaded_under_load(
    engine: Engine, versions: Mapping[str, Path], tokens_between: int
) -> tuple[list[Sampled], list[LoadResult]]:
    """Load all versions while 16 clients sample; the first one before they begin.

    Each reply has tokens and spans in the order of the versions, or the test fails.

    Args:
        engine: the engine.
        versions: ids and directories, in the order of loading.
        tokens_between: sampled between two loads, at least.

    Returns:
        All replies, and the loads but the first.
    """
    replies: list[Sampled] = []
    loads: list[LoadResult] = []

    async def client(number: int, until: asyncio.Event) -> None:
        # Different lengths, so that the calls end at different times and every swap meets calls in
        # flight.
        tokens = 140 + 4 * number
        while not until.is_set():
            body = request(
                temperature=1.0, max_tokens=tokens, ignore_eos=True, stream=number % 2 == 0
            )
            replies.append((await chat(engine, body)).tokens)
            assert len(replies[-1].ids) == tokens

    async def under_load() -> None:
        """Wait until the calls in flight have sampled from the loaded version."""
        before = await counted(engine, "vllm:generation_tokens_total")
        async with asyncio.timeout(300):
            while (  # noqa: ASYNC110 - another process counts
                await counted(engine, "vllm:generation_tokens_total") < before + tokens_between
            ):
                await asyncio.sleep(0.02)

    async def scenario() -> None:
        (first, directory), *others = versions.items()
        await engine.load(first, directory)
        loaded = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for i in range(CLIENTS):
                clients.create_task(client(i, loaded))
            for version, directory in others:
                await under_load()
                served = await engine_label(engine.http, engine.url)
                result = await load_version(
                    engine.http, engine.url, version, manifest(directory), engine.work, served
                )
                print(version, result, f"{result.total_ms:.0f} ms")
                assert await engine_label(engine.http, engine.url) == version
                loads.append(result)
            loaded.set()

    engine.run(scenario())
    order = list(versions)
    for reply in replies:
        assert spans_cover(reply)
        seen = [order.index(version) for version, _, _ in reply.spans]
        assert seen == sorted(set(seen))
    return replies, loads


def worst_of_spans(replies: Iterable[Sampled], versions: Mapping[str, Path]) -> float:
    """Return the largest error of a log-probability, recomputed with the version of its span.

    The prefix of a span is all tokens before it, whichever versions sampled them.
    """
    largest = 0.0
    for reply in replies:
        for version, start, end in reply.spans:
            prefix = reply.prompt_ids + reply.ids[:start]
            expected = logprobs_of(versions[version], prefix, reply.ids[start:end])
            largest = max(largest, worst(reply.logprobs[start:end], expected))
    return largest

"""The pause of a vLLM server that loads versions while calls are in flight."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file, save_file

from benchmarks.processes import free_port
from clawstream.demo.model import MAX_TOKENS, make_random_model
from clawstream.rollout.server.load_weights import engine_label, load_version
from clawstream.rollout.server.process import VllmServer
from clawstream.runtime.digests import sha256
from clawstream.runtime.weights.delta import Snapshot, mapped, write_delta
from clawstream.schemas.records import WeightFile
from clawstream.schemas.settings import RolloutSettings
from clawstream.trainer.versions.publish import DELTA

LOADS, CLIENTS, TOKENS = 20, 8, 120
NAME = "model.safetensors"


def part_pause(directory: Path, _: Path | None) -> dict[str, Any]:
    """Load LOADS deltas of the demo's model in bfloat16, with CLIENTS calls in flight."""
    model = make_random_model(directory / "model", dtype="bfloat16")
    settings = RolloutSettings.model_validate(
        {"port": free_port(), "dtype": "bfloat16", "max_model_len": MAX_TOKENS, "kv_cache_mb": 64}
    )
    server = VllmServer(settings, model, directory / "vllm.log")
    return asyncio.run(_measure(server, _chain(model, directory / "versions"), directory / "cache"))


def _chain(model: Path, directory: Path) -> list[WeightFile]:
    """Return a full version's file and LOADS deltas. Each changes a percent of the elements."""
    (directory / "0").mkdir(parents=True)
    tensors = load_file(model / NAME)
    save_file(tensors, directory / "0" / NAME, {"format": "pt"})
    files, base = [_file(directory / "0" / NAME)], _snapshot(directory / "0")
    for number in range(1, LOADS + 1):
        for tensor in tensors.values():
            bits = tensor.view(torch.int16)
            bits += (torch.rand(bits.shape) < 0.01).short()
        new = directory / str(number)
        new.mkdir()
        save_file(tensors, new / NAME, {"format": "pt"})
        with (new / DELTA).open("wb") as target:
            following = write_delta(base, mapped(new), target)
        assert following is not None
        files.append(_file(new / DELTA))
        base = following
    return files


async def _measure(
    server: VllmServer, files: Sequence[WeightFile], cache_dir: Path
) -> dict[str, Any]:
    failed, tasks = 0, set[asyncio.Task[None]]()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as http:

        async def client() -> None:
            nonlocal failed
            body = {"model": "policy", "prompt": "k1", "max_tokens": TOKENS, "ignore_eos": True}
            while True:
                async with http.post(f"{server.base_url}/v1/completions", json=body) as reply:
                    failed += reply.status != 200
                    await reply.read()

        await server.start()
        try:
            await server.wait_ready(http)
            tasks |= {asyncio.create_task(client()) for _ in range(CLIENTS)}
            results = []
            for number in itertools.count():
                await asyncio.sleep(1.0)  # calls in flight sample with the version
                name, served = f"bench/{number}.0", await engine_label(http, server.base_url)
                chain = files[: number + 1]
                results.append(
                    await load_version(http, server.base_url, name, chain, cache_dir, served)
                )
                if number == LOADS:
                    break
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop()
    failed += sum(not isinstance(end, asyncio.CancelledError) for end in ended)
    pauses = [result.pause_ms for result in results[1:]]
    return {
        "pause_ms_p50": statistics.median(pauses),
        "pause_ms_max": max(pauses),
        "load_ms_p50": statistics.median(result.total_ms for result in results[1:]),
        "loads_under_load": len(pauses),
        "failed_requests": failed,
    }


def _snapshot(directory: Path) -> Snapshot:
    return Snapshot(mapped(directory), {NAME: sha256(directory / NAME)})


def _file(path: Path) -> WeightFile:
    return WeightFile(url=path.as_uri(), sha256=sha256(path), size_bytes=path.stat().st_size)

"""Load a published weight version into a running engine.

1. Get the files of the version, check size and sha256 of each, and apply deltas, in the worker
   (`clawstream.runtime.weights.files`).
2. Ask the engine's API server to load it, naming the version that the engine is believed to serve
   (`clawstream.rollout.vllm_plugin.weight_loader`). The server stages, swaps and labels in one
   request; it refuses when another worker has loaded another version since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from clawstream.rollout.errors import EngineBroken, EngineChanged, EngineUnavailable, InvalidWeights
from clawstream.rollout.server.weight_files import adapter_files
from clawstream.rollout.vllm_plugin import weight_loader
from clawstream.rollout.vllm_plugin.weight_loader import PATH
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.weights.files import get_files
from clawstream.schemas.errors import ForeseenError
from clawstream.schemas.records import WeightFile

TENSORS = ".safetensors"
_TIMEOUT = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Duration of a load in milliseconds: verification, staging, and the pause without sampling.

    Attributes:
        verify_ms: including downloads and the application of deltas.
        digests: SHA-256 of the loaded files.
        held: Versions whose adapters the engine holds.
    """

    verify_ms: float
    stage_ms: float
    pause_ms: float
    digests: tuple[str, ...] = ()
    held: tuple[str, ...] = ()

    @property
    def total_ms(self) -> float:
        return self.verify_ms + self.stage_ms + self.pause_ms


async def load_version(
    http: aiohttp.ClientSession,
    base_url: str,
    version_id: str,
    files: Sequence[WeightFile],
    cache_dir: Path,
    served: str,
    base_model: str | None = None,
) -> LoadResult:
    """Load a weight version into the engine behind `base_url`.

    Args:
        http: The session for the requests.
        base_url: Of the engine.
        version_id: Becomes the engine's label.
        files: Of the version.
        cache_dir: For files that must be downloaded or rebuilt.
        served: The label that the engine is believed to have.
        base_model: Of an adapter.

    Raises:
        InvalidWeights: The version does not fit the engine; the old one serves on.
        WeightsUnreadable: A file is missing or damaged; the old version serves on.
        EngineChanged: The engine serves another version than `served`; nothing was touched.
        EngineUnavailable: The engine did not answer; ask for its label before the next try.
        EngineBroken: The engine failed in the swap.
    """
    began = time.perf_counter()
    verified = await asyncio.to_thread(get_files, files, cache_dir)
    if base_model is None:
        needed = [path for path in verified if path.suffix == TENSORS]
    else:
        needed = await asyncio.to_thread(adapter_files, version_id, verified, cache_dir)
    verify_ms = (time.perf_counter() - began) * 1e3
    body = {
        "version_id": version_id,
        "served": served,
        "files": [str(path) for path in needed],
        "base_model": base_model,
    }
    status, answer = await _call(http, "POST", base_url, body)
    if status != weight_loader.LOADED:
        raise _refusal(status, answer, base_url, version_id, served)
    return LoadResult(
        verify_ms=verify_ms,
        stage_ms=answer["stage_ms"],
        pause_ms=answer["pause_ms"],
        digests=tuple(verified.values()),
        held=tuple(answer.get("held", ())),
    )


def _refusal(
    status: int, answer: dict[str, Any], base_url: str, version_id: str, served: str
) -> ForeseenError:
    """Return the error that a reply other than LOADED means."""
    match status:
        case weight_loader.CHANGED:
            return EngineChanged(base_url, str(answer["weight_version"]), served)
        case weight_loader.INVALID_WEIGHTS:
            return InvalidWeights(f"{version_id} rejected by the engine: {answer['error']}")
        case weight_loader.UNREADABLE_WEIGHTS:
            return WeightsUnreadable(f"{version_id} not read by the engine: {answer['error']}")
        case weight_loader.BROKEN:
            return EngineBroken(
                f"{base_url} failed while {version_id} was put into its model: {answer['error']}"
            )
        case _:
            return EngineUnavailable(f"POST {base_url}{PATH}: {status} {answer}")


async def engine_label(http: aiohttp.ClientSession, base_url: str) -> str:
    """Return the version label of the engine; "default" after its start.

    Waits for a load that is under way.

    Raises:
        EngineUnavailable: The engine did not answer.
    """
    status, answer = await _call(http, "GET", base_url)
    if status != 200:
        raise EngineUnavailable(f"GET {base_url}{PATH}: {status} {answer}")
    return str(answer["weight_version"])


async def _call(
    http: aiohttp.ClientSession, method: str, base_url: str, body: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    url = base_url + PATH
    try:
        # One connection for each call: vLLM closes idle ones, and a POST that meets that is not
        # safe to repeat.
        async with http.request(
            method, url, json=body, timeout=_TIMEOUT, headers={"Connection": "close"}
        ) as reply:
            if reply.content_type != "application/json":
                raise EngineUnavailable(
                    f"{method} {urlsplit(url).path}: {reply.status} {(await reply.text())[:500]}; "
                    "vLLM must run with --middleware "
                    "clawstream.rollout.vllm_plugin.weight_loader.WeightLoader"
                )
            answer = await reply.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineUnavailable(f"{method} {url}: {type(error).__name__} {error}") from error
    return reply.status, answer if isinstance(answer, dict) else {"error": answer}

"""From a published weight version to an engine that serves it, without a restart.

1. verify        every file of the manifest against its size and sha256, here in the worker
2. stage         /start_weight_update, /update_weights: the engine reads the tensors into memory and checks them against its
                 model. Up to here nothing has changed: an error leaves the old version serving.
3. swap          /pause?mode=keep&clear_cache=true; /finish_weight_update puts the tensors into the model and sets its
                 label; /resume. Requests in flight wait, then go on with the new weights over a recomputed cache, and
                 the engine's spans say which token is whose. An error inside means a broken engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp

from rollout.engine import INVALID
from rollout.errors import EngineBroken, EngineUnavailable, InvalidWeights, WeightsUnreadable
from schemas.events import WeightFile

_TIMEOUT = aiohttp.ClientTimeout(total=600)
_WORKER_HINT = "', please check the stack trace"  # vLLM puts it behind what a worker raised
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Reading again would find the same; any other error of a file system may pass."""
_READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What a load took, in milliseconds: verifying, staging, and the pause in which no token was sampled."""

    version_id: str
    verify_ms: float
    stage_ms: float
    pause_ms: float

    @property
    def total_ms(self) -> float:
        return self.verify_ms + self.stage_ms + self.pause_ms


def local_path(file: WeightFile, cache_dir: Path) -> Path:
    """Where a file of a version lies on this machine: itself, or a copy under `cache_dir` made by fsspec, named by its digest."""
    parts = urlsplit(file.url)
    if parts.scheme in ("", "file"):
        return Path(unquote(parts.path) if parts.scheme else file.url).resolve()
    copy = cache_dir / file.sha256 / Path(parts.path).name
    if not copy.exists():
        import fsspec  # type: ignore[import-untyped]

        copy.parent.mkdir(parents=True, exist_ok=True)
        part = copy.with_name(copy.name + ".part")
        try:
            with fsspec.open(file.url, "rb") as source, part.open("wb") as target:
                shutil.copyfileobj(source, target, _READ_BYTES)
        except (*_ABSENT, ValueError, ImportError) as error:
            raise InvalidWeights(f"{file.url}: {error}") from error
        except OSError as error:
            raise WeightsUnreadable(f"{file.url}: {error}") from error
        part.rename(copy)
    return copy


def verify(files: Sequence[WeightFile], cache_dir: Path) -> dict[Path, str]:
    """Local path and sha256 of every file, each read and compared. Raises InvalidWeights or WeightsUnreadable."""
    found: dict[Path, str] = {}
    for file in files:
        path = local_path(file, cache_dir)
        digest = hashlib.sha256()
        try:
            with path.open("rb") as data:
                while block := data.read(_READ_BYTES):
                    digest.update(block)
            size = path.stat().st_size
        except _ABSENT as error:
            raise InvalidWeights(f"{file.url}: {error}") from error
        except OSError as error:
            raise WeightsUnreadable(f"{file.url}: {error}") from error
        if size != file.size_bytes or digest.hexdigest() != file.sha256:
            raise InvalidWeights(
                f"{file.url}: {size} bytes with sha256 {digest.hexdigest()}, the manifest says {file.size_bytes} with {file.sha256}"
            )
        found[path] = file.sha256
    return found


async def load_version(
    http: aiohttp.ClientSession, base_url: str, version_id: str, files: Sequence[WeightFile], cache_dir: Path
) -> LoadResult:
    """Bring a full weight version into the engine behind `base_url`. Raises InvalidWeights, WeightsUnreadable, EngineUnavailable
    or EngineBroken.
    """
    t0 = time.perf_counter()
    verified = await asyncio.to_thread(verify, files, cache_dir)
    tensors = {str(path): sha256 for path, sha256 in verified.items() if path.suffix == ".safetensors"}
    t1 = time.perf_counter()
    await _stage(http, base_url, version_id, tensors)
    t2 = time.perf_counter()
    await _to_its_end(_swap(http, base_url, version_id))
    t3 = time.perf_counter()
    return LoadResult(
        version_id=version_id, verify_ms=(t1 - t0) * 1e3, stage_ms=(t2 - t1) * 1e3, pause_ms=(t3 - t2) * 1e3
    )


async def _to_its_end(swap: Coroutine[Any, Any, None]) -> None:
    """A swap is not left half-way when its caller is cancelled: the engine would stay paused."""
    task = asyncio.create_task(swap)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def engine_label(http: aiohttp.ClientSession, base_url: str) -> str:
    """The version label of the engine; "default" after its start. Raises EngineUnavailable."""
    return str((await _call(http, "GET", f"{base_url}/weight_info"))["weight_version"])


async def resume(http: aiohttp.ClientSession, base_url: str) -> None:
    """Let requests go on, in case a killed worker left the engine paused. Raises EngineUnavailable."""
    await _call(http, "POST", f"{base_url}/resume")


async def _stage(http: aiohttp.ClientSession, base_url: str, version_id: str, files: dict[str, str]) -> None:
    update = {"update_info": {"files": files}}
    try:
        await _call(http, "POST", f"{base_url}/start_weight_update")
    except _Refused:
        # A worker that was killed between start and finish left its update open. An empty one fails, and so closes it.
        await _forget(http, base_url)
        await _call(http, "POST", f"{base_url}/start_weight_update")
    try:
        await _call(http, "POST", f"{base_url}/update_weights", update)
    except _Refused as refused:
        _, invalid, reason = str(refused).partition(INVALID)
        if not invalid:
            raise
        raise InvalidWeights(f"{version_id} refused by the engine: {reason.partition(_WORKER_HINT)[0]}") from refused


async def _forget(http: aiohttp.ClientSession, base_url: str) -> None:
    with contextlib.suppress(_Refused):
        await _call(http, "POST", f"{base_url}/update_weights", {"update_info": {"files": {}}})


async def _swap(http: aiohttp.ClientSession, base_url: str, version_id: str) -> None:
    await _call(http, "POST", f"{base_url}/pause?mode=keep&clear_cache=true")
    try:
        await _call(http, "POST", f"{base_url}/finish_weight_update", {"weight_version": version_id})
        label = await engine_label(http, base_url)
        if label != version_id:
            raise EngineBroken(f"{base_url} says it serves {label} after loading {version_id}")
        await _call(http, "POST", f"{base_url}/resume")
    except EngineUnavailable as error:
        # Not resumed: the next request would meet weights in pieces.
        raise EngineBroken(f"{base_url} failed while {version_id} was put into its model: {error}") from error


class _Refused(EngineUnavailable):
    """The engine answered with an error status."""


async def _call(
    http: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        # A connection for each call: vLLM closes one that is idle, and one on which it reported an error, and a POST that meets
        # that is not safe to repeat.
        async with http.request(method, url, json=body, timeout=_TIMEOUT, headers={"Connection": "close"}) as reply:
            if reply.status != 200:
                raise _Refused(f"{method} {urlsplit(url).path}: {reply.status} {(await reply.text())[:500]}")
            answer: dict[str, Any] = await reply.json()
            return answer
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineUnavailable(f"{method} {url}: {type(error).__name__} {error}") from error

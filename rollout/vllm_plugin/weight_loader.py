"""Weight loading inside vLLM's API server: an ASGI middleware that loads a version in one request.

    --middleware clawstream.rollout.vllm_plugin.weight_loader.WeightLoader

    GET  /clawstream/weights   -> {"weight_version": LABEL}
    POST /clawstream/weights   {"version_id", "served", "files": [path], "base_model"}

1. One load runs at a time; a second request waits for the first.
2. `served` must equal the engine's label, else the reply is 409 and nothing is touched. So of two
   workers on one engine neither can put a label on weights of the other.
3. Stage: the engine reads the files and checks them against its model
   (`clawstream.rollout.vllm_plugin.engine`). An error leaves the old version serving.
4. Swap: pause with the requests in flight kept, put the tensors into the model, set the label,
   resume. Requests go on with the new weights over a recomputed cache. An error leaves the engine
   paused and broken.

An adapter, a version with `base_model`, is loaded beside the others instead of 3 and 4
(`clawstream.rollout.vllm_plugin.adapters`).

The load continues when its client disconnects, so a killed worker never leaves an update open or an
engine paused. Nothing here imports vLLM.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import orjson

from clawstream.rollout.errors import InvalidWeights
from clawstream.rollout.vllm_plugin.adapters import AdaptersBusy, adapters_of
from clawstream.rollout.vllm_plugin.engine import INVALID, UNREADABLE
from clawstream.rollout.vllm_plugin.token_capture import App, Receive, Scope, Send
from clawstream.runtime.errors import WeightsUnreadable

PATH = "/clawstream/weights"
LOADED, CHANGED, INVALID_WEIGHTS, UNREADABLE_WEIGHTS, UNAVAILABLE, BROKEN = (
    200, 409, 422, 424, 503, 500,
)  # fmt: skip
"""Status of a reply to POST."""
_WORKER_HINT = "', please check the stack trace"
"""vLLM appends it to the text of an error that a worker raised."""
_MAX_BODY_BYTES = 16 * 1024 * 1024


class WeightLoader:
    """The middleware. It answers `/clawstream/weights` and passes other requests on."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        client = scope["app"].state.engine_client
        if scope["method"] == "GET":
            async with self._lock:
                await _reply(send, 200, {"weight_version": await client.get_weight_version()})
        elif scope["method"] == "POST":
            try:
                load = orjson.loads(await _body(receive))
                version_id, served, files = load["version_id"], load["served"], load["files"]
                base_model = load.get("base_model")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                await _reply(send, 400, {"error": f"not a load request: {error!r}"})
                return
            async with self._lock:
                if base_model is None:
                    status, answer = await _load(client, version_id, served, files)
                else:
                    status, answer = await _load_adapter(
                        client, version_id, served, files, base_model
                    )
            await _reply(send, status, answer)
        else:
            await _reply(send, 405, {"error": "GET or POST"})


async def _load(
    client: Any, version_id: str, served: str, files: list[str]
) -> tuple[int, dict[str, Any]]:
    began = time.perf_counter()
    try:
        label = await client.get_weight_version()
        if label != served:
            return CHANGED, {"weight_version": label}
        if adapters_of(client).enabled:
            return INVALID_WEIGHTS, {"error": "an engine with --enable-lora loads adapters only"}
        await client.start_weight_update()
        # vLLM closes the update itself when this fails.
        await client.update_weights(SimpleNamespace(update_info={"files": files}))
    except Exception as error:  # noqa: BLE001 - vLLM raises whatever its processes raised
        for mark, status in ((INVALID, INVALID_WEIGHTS), (UNREADABLE, UNREADABLE_WEIGHTS)):
            _, found, reason = str(error).partition(mark)
            if found:
                return status, {"error": reason.partition(_WORKER_HINT)[0]}
        return UNAVAILABLE, {"error": f"{type(error).__name__}: {error}"}
    staged = time.perf_counter()
    try:
        await client.pause_generation(mode="keep", clear_cache=True)
        await client.finish_weight_update(version_id)
        await client.resume_generation()
    except Exception as error:  # noqa: BLE001 - as above; the engine stays paused
        return BROKEN, {"error": f"{type(error).__name__}: {error}"}
    swapped = time.perf_counter()
    return LOADED, {
        "weight_version": version_id,
        "stage_ms": (staged - began) * 1e3,
        "pause_ms": (swapped - staged) * 1e3,
    }


async def _load_adapter(
    client: Any, version_id: str, served: str, files: list[str], base_model: str
) -> tuple[int, dict[str, Any]]:
    began = time.perf_counter()
    adapters = adapters_of(client)
    try:
        label = await client.get_weight_version()
        if label != served:
            return CHANGED, {"weight_version": label}
        await adapters.load(version_id, files, base_model)
    except InvalidWeights as error:
        return INVALID_WEIGHTS, {"error": str(error).partition(_WORKER_HINT)[0]}
    except WeightsUnreadable as error:
        return UNREADABLE_WEIGHTS, {"error": str(error)}
    except AdaptersBusy as error:
        return UNAVAILABLE, {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - vLLM raises whatever its processes raised
        return UNAVAILABLE, {"error": f"{type(error).__name__}: {error}"}
    return LOADED, {
        "weight_version": version_id,
        "stage_ms": (time.perf_counter() - began) * 1e3,
        "pause_ms": 0.0,
        "held": adapters.held,
    }


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    more, size = True, 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the client left")
        parts.append(message.get("body", b""))
        more, size = message.get("more_body", False), size + len(parts[-1])
        if size > _MAX_BODY_BYTES:
            raise ValueError(f"more than {_MAX_BODY_BYTES} bytes")
    return b"".join(parts)


async def _reply(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = orjson.dumps(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

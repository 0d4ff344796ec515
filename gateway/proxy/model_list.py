"""Lists the models of all engines: `GET /v1/models` and `GET /v1/models/NAME`.

Each engine lists its own models. The list of the gateway has those of all ready engines that serve
the run, without the ones that `models` of an upstream leaves out, and the names of its `model_map`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clawstream.gateway.asgi.error_replies import Reply, json_reply
from clawstream.gateway.engines.client import ask
from clawstream.gateway.engines.pool import EnginePool
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.errors import GatewayError
from clawstream.gateway.protocols.reply_fields import loads

PATH = "/v1/models"


async def model_list(
    pool: EnginePool,
    specs: Sequence[EngineSpec],
    path: str,
    headers: Mapping[str, str],
    credentials: Mapping[str, str],
) -> dict[str, Any] | None:
    """Ask all engines for their models; None: none of them sent a list.

    Args:
        specs: The engines to ask.
        path: `/v1/models`, with the query of the client.
        headers, credentials: Those of the client for the engines.
    """
    lists = await asyncio.gather(
        *(_listed(pool, spec, path, headers, credentials) for spec in specs)
    )
    return merged(zip(specs, lists, strict=True))


async def _listed(
    pool: EnginePool, spec: EngineSpec, path: str, headers: Mapping[str, str],
    credentials: Mapping[str, str],
) -> dict[str, Any] | None:  # fmt: skip
    try:
        status, body = await ask(pool, spec, path, headers, credentials)
        found = loads(body) if status == 200 else None
    except (GatewayError, ConnectionError, TimeoutError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("data"), list) else None


def merged(lists: Iterable[tuple[EngineSpec, dict[str, Any] | None]]) -> dict[str, Any] | None:
    """Join the lists of engines; the first entry of a name counts."""
    whole: dict[str, Any] | None = None
    models: dict[str, Any] = {}
    for spec, found in lists:
        if found is None:
            continue
        whole = found if whole is None else whole
        own = {model["id"]: model for model in found["data"] if _named(model)}
        for name in spec.models or tuple(own):
            models.setdefault(name, own.get(name) or _entry(name, own))
        for asked, name in spec.model_map.items():
            models.setdefault(asked, (own.get(name) or _entry(asked, own)) | {"id": asked})
    return None if whole is None else whole | {"data": list(models.values())}


def _named(model: Any) -> bool:
    return isinstance(model, dict) and isinstance(model.get("id"), str)


def _entry(name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry for a name that the engine does not list, in the form of its other ones."""
    form = next(iter(own.values()), {"object": "model"})
    return {"id": name} | {field: form[field] for field in ("object", "type") if field in form}


def model_reply(models: Mapping[str, Any], name: str) -> Reply | None:
    """Return the reply for the list, or for the model of a name; None: it has no such model."""
    if not name:
        found: Any = models
    else:
        found = next((model for model in models["data"] if model["id"] == name), None)
        if found is None:
            return None
    return json_reply(found)

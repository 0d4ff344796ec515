"""The engines from `claw.workers` and the settings, and their order for a trajectory. No I/O.

The registry is a fold over worker statuses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol, TypeVar

from clawstream.gateway.engines.http1 import address_of
from clawstream.gateway.errors import UpstreamUnusable
from clawstream.gateway.protocols.base import EngineKind
from clawstream.schemas.ids import parse_version
from clawstream.schemas.records import WorkerState, WorkerStatus
from clawstream.schemas.settings import UpstreamSettings

MISSED_HEARTBEATS = 3
CROWDED = 2
"""A trajectory leaves its engine at more than this many times the calls of the least loaded one."""
_API_ROOT = re.compile(r"/v\d+[a-z0-9]*(/openai)?$")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine that can be called.

    name: Unique name.
    worker_id: None: the engine is named in the settings and sends no heartbeats.
    models: Models that it serves; (): not known.
    kind_known: False: a probe has to find the kind.
    api_root: Replaces `/v1` in its paths.
    model_map: Its own name for each model that clients ask for.
    """

    name: str
    base_url: str
    worker_id: str | None = None
    models: tuple[str, ...] = ()
    run_id: str | None = None
    kind: EngineKind = "text"
    kind_known: bool = False
    api_root: str = "/v1"
    api_key: str | None = field(default=None, repr=False)
    api_key_header: str | None = None
    forward_credentials: bool = False
    model_map: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class _Reported:
    spec: EngineSpec
    state: WorkerState
    until_s: float  # the worker is absent after this time
    version: str | None = None  # version of the weights that it samples with
    failed_loads: int = 0


def _split(url: str) -> tuple[str, str]:
    """Split the URL of an engine into base URL and API root.

    `https://host/api/v4` becomes `https://host/api` and `/v4`.
    """
    url = url.rstrip("/")
    found = _API_ROOT.search(url)
    return (url[: found.start()], found[0]) if found is not None else (url, "/v1")


def _static(
    upstream: UpstreamSettings, environ: Mapping[str, str], taken: Collection[str]
) -> EngineSpec:
    key = upstream.api_key
    if upstream.api_key_env is not None:
        key = environ.get(upstream.api_key_env)
        if not key:
            raise UpstreamUnusable(
                f"gateway.upstreams: the key of {upstream.url} is to be in the environment "
                f"as {upstream.api_key_env}, which is not set"
            )
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        where = upstream.api_key_env or "its api_key"
        raise UpstreamUnusable(
            f"gateway.upstreams: the key of {upstream.url} ({where}) has characters "
            "that no header can hold"
        )
    base, root = _split(upstream.url)
    try:
        address_of(base)
    except ValueError as error:
        raise UpstreamUnusable(f"gateway.upstreams: {error}") from error
    number = sum(name == upstream.url or name.startswith(f"{upstream.url}#") for name in taken)
    return EngineSpec(
        name=f"{upstream.url}#{number + 1}" if number else upstream.url,
        base_url=base,
        models=upstream.models,
        kind="text" if upstream.kind == "auto" else upstream.kind,
        kind_known=upstream.kind != "auto",
        api_root=root,
        api_key=key,
        api_key_header=upstream.api_key_header,
        forward_credentials=upstream.forward_credentials,
        model_map=upstream.model_map,
    )


class EngineRegistry:
    """The last status of every worker, and the engines of the settings.

    Times are seconds of one clock that stands still while the topic cannot be read: an outage of
    Kafka stops the heartbeats but not the engines.

    Args:
        upstreams: As in the settings.
        environ: Environment variables with their API keys; None: those of this process.

    Raises:
        UpstreamUnusable: The key or the URL of an upstream is missing or not valid.
    """

    def __init__(
        self,
        upstreams: Iterable[UpstreamSettings | str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._reported: dict[str, _Reported] = {}
        self._listeners: list[Callable[[], None]] = []
        self._static: dict[str, EngineSpec] = {}
        self._ready: tuple[EngineSpec, ...] = ()
        self._ready_until_s = float("-inf")
        self.configure(upstreams)

    def configure(self, upstreams: Iterable[UpstreamSettings | str]) -> None:
        """Set the engines of the settings. An engine that is removed gets no new calls.

        Raises:
            UpstreamUnusable: The key or the URL of an upstream is missing or not valid.
        """
        named: dict[str, EngineSpec] = {}
        for upstream in upstreams:
            spec = _static(UpstreamSettings.model_validate(upstream), self._environ, named)
            named[spec.name] = spec
        self._static = named
        self._changed()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener()` whenever the set of ready engines may have changed."""
        self._listeners.append(listener)

    def update(self, worker_id: str, status: WorkerStatus | None, now_s: float) -> None:
        """Fold one record. status: None is a tombstone, the clean exit of the worker."""
        before = self._reported.get(worker_id)
        if status is None:
            if self._reported.pop(worker_id, None) is not None:
                self._changed()
            return
        base, root = _split(status.base_url)
        spec = EngineSpec(worker_id, base, worker_id, status.models, status.run_id, api_root=root)
        until_s = now_s + MISSED_HEARTBEATS * status.heartbeat_interval_ms / 1000
        now = self._reported[worker_id] = _Reported(
            spec, status.state, until_s, status.weight_version, status.failed_loads
        )
        if (
            before is None
            or before.until_s < now_s
            or (before.spec, before.state, before.failed_loads)
            != (now.spec, now.state, now.failed_loads)
        ):
            self._changed()

    def clear(self) -> None:
        """Remove all worker statuses: the topic was recreated, so they are not valid any more."""
        self._reported.clear()
        self._changed()

    def ready(self, now_s: float) -> tuple[EngineSpec, ...]:
        """Return the engines of the settings and the workers that are ready.

        A worker is ready if it reported so within its last three heartbeat intervals. Returns the
        same object until the set changes.
        """
        if now_s > self._ready_until_s:
            fresh = [
                h for h in self._reported.values() if h.state == "ready" and now_s <= h.until_s
            ]
            ready = (*self._static.values(), *(h.spec for h in fresh))
            if ready != self._ready:
                self._ready = ready
            self._ready_until_s = min((h.until_s for h in fresh), default=float("inf"))
        return self._ready

    def states(self, now_s: float) -> dict[str, str]:
        """Return the last state of each worker; `absent` after three missed heartbeats."""
        return {
            name: h.state if now_s <= h.until_s else "absent" for name, h in self._reported.items()
        }

    def failed_loads(self) -> dict[str, int]:
        """Return how often each worker failed to load a version since its engine's start."""
        return {name: h.failed_loads for name, h in self._reported.items()}

    def oldest_loaded(self, run_id: str, now_s: float) -> int | None:
        """Return the lowest sync index of the run that a ready worker samples with.

        None: no ready worker reports a version of the run.
        """
        ready = (
            h.version for h in self._reported.values() if h.state == "ready" and now_s <= h.until_s
        )
        versions = (parse_version(label) for label in ready if label is not None)
        return min(
            (v.sync_index for v in versions if v is not None and v.run_id == run_id), default=None
        )

    def _changed(self) -> None:
        self._ready_until_s = float("-inf")
        for listener in self._listeners:
            listener()


def of_run(specs: Collection[EngineSpec], run_id: str) -> list[EngineSpec]:
    """Return the engines that follow the run, or any; all of them if none does."""
    chosen = [w for w in specs if w.run_id is None or w.run_id == run_id]
    return chosen or list(specs)


def eligible(specs: Sequence[EngineSpec], run_id: str, model: str | None) -> Sequence[EngineSpec]:
    """Return the engines that follow the run and serve the model.

    A condition that no engine meets is dropped: the engine itself then reports the error.
    """
    if len(specs) < 2:
        return specs
    chosen = of_run(specs, run_id)
    return [w for w in chosen if serves(w, model)] or chosen


def serves(spec: EngineSpec, model: str | None) -> bool:
    """Return whether an engine serves a model; None: the request names none.

    An engine of the settings with `models` serves only these. A worker has a model of its own.
    """
    if model is None:
        return not spec.models or spec.worker_id is not None
    return not spec.models or model in spec.models or model in spec.model_map


class Named(Protocol):
    """An engine with a name, and calls in flight."""

    @property
    def name(self) -> str: ...
    @property
    def in_flight(self) -> int: ...


N = TypeVar("N", bound=Named)


def choose(engines: Sequence[N], key: str) -> N | None:
    """Choose the engine of a trajectory by rendezvous hashing; None: there is no engine.

    Every gateway chooses the same engine, which has the prefix in its cache. When an engine leaves,
    only its own trajectories move. If the engine is crowded, the least loaded one is chosen.
    """
    if len(engines) < 2:
        return engines[0] if engines else None

    def rank(engine: N) -> bytes:
        return blake2b(f"{engine.name}\0{key}".encode(), digest_size=8).digest()

    ranked = sorted(engines, key=rank)
    first = ranked[0]
    if first.in_flight <= CROWDED:
        return first
    least = min(ranked, key=lambda engine: engine.in_flight)
    return least if first.in_flight > CROWDED * max(1, least.in_flight) else first

"""The only file that imports vLLM; it runs inside vLLM's own processes. It adds three things to a stock server:

1. `register`, the `vllm.general_plugins` entry point, loaded in every vLLM process: a weight-transfer backend `disk` that
   checks everything before the live model is touched, and a bond to the parent process.
2. `WeightVersions`, a `--middleware`: every endpoint tells which weight version sampled which token, from the engine's own
   spans. vLLM itself reports them on one endpoint only, which no agent speaks.

    a plain reply     header `x-clawstream-versions: [[{"version": "v1", "start": 0, "end": 12}], ...]`
    an event stream   comment `: clawstream-versions [[...]]` before `data: [DONE]`, or at the end where there is none
    every reply       header `x-clawstream-version-start: v1`, the engine's label when the request arrived

   One list per choice, over output-token indexes, without holes; null for a choice that did not end. Beam search has no such
   spans: its lists do not fit the choices. A reader checks the count and that the last `end` is the number of tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.errors import InvalidWeights

if TYPE_CHECKING:
    import torch

BACKEND = "disk"
VERSIONS = "x-clawstream-versions"
VERSION_START = "x-clawstream-version-start"
COMMENT = "clawstream-versions"
INVALID = "invalid weights: "
DIE_WITH_PARENT = "CLAWSTREAM_DIE_WITH_PARENT"
WORKER_NICE = "CLAWSTREAM_WORKER_NICE"

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Spans = list[dict[str, Any]]


# ---------------------------------------------------------------- plugin, in every vLLM process


def register() -> None:
    """Entry point of `vllm.general_plugins`: idempotent, as vLLM may call it several times in a process."""
    if os.environ.get(DIE_WITH_PARENT):
        _die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _disk_backend())


def _die_with_parent() -> None:
    """A killed API server must not leave an engine that holds memory and the device: ask the kernel for SIGKILL then."""
    if ctypes.CDLL(None).prctl(1, int(signal.SIGKILL)) == 0 and os.getppid() == 1:
        os._exit(1)  # the parent died before the bond was made


def read_layout(model_dir: Path) -> Layout:
    """Names, dtypes and shapes of a model directory's safetensors: what every later version must look like."""
    from safetensors import safe_open

    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                part = tensors.get_slice(name)
                layout[name] = (str(part.get_dtype()), tuple(part.get_shape()))
    if not layout:
        raise InvalidWeights(f"{model_dir} has no *.safetensors: the disk backend needs a local model directory")
    return layout


def stage(files: Mapping[str, str], expected: Layout) -> dict[str, torch.Tensor]:
    """Read safetensors into memory and check all of it: files (path to sha256), names, dtypes, shapes, finiteness.

    Each file is read once, so what was checked is what is loaded. Raises InvalidWeights.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    weights: dict[str, torch.Tensor] = {}
    for path, sha256 in sorted(files.items()):
        try:
            data = Path(path).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            if digest != sha256:
                raise InvalidWeights(f"{path}: sha256 is {digest}, not {sha256}")
            weights |= load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            found |= {n: (t["dtype"], tuple(t["shape"])) for n, t in header.items() if n != "__metadata__"}
        except (OSError, SafetensorError) as error:
            raise InvalidWeights(f"{path}: {error}") from error
    if found != expected:
        raise InvalidWeights(f"not the tensors of the model that is served: {_difference(found, expected)}")
    broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise InvalidWeights(f"values that are not finite in {broken[:3]}")
    return weights


def _difference(found: Layout, expected: Layout) -> str:
    kinds = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys()),
        "other dtype or shape": sorted(n for n in found.keys() & expected.keys() if found[n] != expected[n]),
    }
    return "; ".join(f"{kind}: {', '.join(names[:3])} ({len(names)})" for kind, names in kinds.items() if names)


def _disk_backend() -> type[Any]:
    """The backend's class; made when vLLM is there, so that this module stays light."""
    from dataclasses import dataclass, field

    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing to set up: versions are files."""

    @dataclass
    class Files(WeightTransferUpdateInfo):  # type: ignore[misc]
        """Absolute path of each safetensors file, and its sha256."""

        files: dict[str, str] = field(default_factory=dict)

    class Disk(WeightTransferEngine):  # type: ignore[misc]
        """start: forget; update: check into memory; finish: put it into the model.

        So an error before finish leaves the model as it was, and the caller need not pause for it; an error in finish leaves
        it in pieces, and the engine must be restarted.
        """

        init_info_cls, update_info_cls = NoInit, Files
        staged: dict[str, torch.Tensor] | None = None
        layout: Layout | None = None

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            # Only workers make a backend, once their model is loaded. A worker polls its queue with sched_yield for a second
            # after each message: at equal priority a process on the same core was seen to wait 5 s for its turn.
            os.nice(int(os.environ.get(WORKER_NICE, "0")))

        def init_transfer_engine(self, init_info: NoInit) -> None:
            """Nothing to do."""

        def start_weight_update(self) -> None:
            self.staged = None
            if self.layout is None:
                self.layout = read_layout(Path(self.model_config.model))

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class synchronises the accelerator behind this, which a CPU worker does not have.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Files) -> None:
            if self.layout is None:
                raise RuntimeError("update_weights before start_weight_update")
            try:
                self.staged = stage(update_info.files, self.layout)
            except InvalidWeights as error:
                # Of an error in a worker only the text reaches the caller.
                raise RuntimeError(f"{INVALID}{error}") from error

        def finish_weight_update(self) -> None:
            if self.staged is None:
                raise RuntimeError("finish_weight_update without a successful update_weights")
            weights, self.staged = self.staged, None
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(weights.items()))
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_cpu_heads(self.model)

        def shutdown(self) -> None:
            self.staged = None

    return Disk


def _repack_cpu_heads(model: Any) -> None:
    """vLLM 0.32 on CPU keeps the packed copy of a *tied* output head across a reload: pack it again from the new weights."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear") and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


# ---------------------------------------------------------------- middleware, in the API server


class Generation:
    """The version spans of one `generate` call: a list per choice, None until that choice has ended."""

    def __init__(self, choices: int) -> None:
        self.choices: list[Spans | None] = [None] * choices

    def note(self, output: Any) -> None:
        """Take the spans of what has ended in a RequestOutput of vLLM."""
        for choice in output.outputs:
            if choice.finish_reason is not None and choice.weight_versions is not None:
                spans = [{"version": s.version, "start": s.start, "end": s.end} for s in choice.weight_versions]
                self.choices[choice.index] = spans


_generations: ContextVar[list[Generation] | None] = ContextVar("generations", default=None)


class EngineTap:
    """Listens at vLLM's engine client: what `generate` yields within a request, and each new version label."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._label: str | None = None
        self._generate = client.generate
        self._update_weight_version = client.update_weight_version
        client.generate = self.generate
        client.update_weight_version = self.update_weight_version

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **more: Any) -> AsyncIterator[Any]:
        outputs = self._generate(prompt, sampling_params, *args, **more)
        generations = _generations.get()
        if generations is None:
            return outputs  # type: ignore[no-any-return]
        generations.append(Generation(sampling_params.n or 1))
        return _noting(generations[-1], outputs)

    async def update_weight_version(self, new_version: str) -> None:
        await self._update_weight_version(new_version)
        self._label = new_version

    async def label(self) -> str:
        """The engine's version label; asked once, then followed, for it costs a step of the engine to ask."""
        if self._label is None:
            label = await self._client.get_weight_version()
            if self._label is None:
                self._label = label
        return self._label


async def _noting(generation: Generation, outputs: Any) -> AsyncIterator[Any]:
    # Closing matters: a client that leaves closes this generator, and vLLM's must abort the request at once.
    async with aclosing(outputs):
        async for output in outputs:
            generation.note(output)
            yield output


class WeightVersions:
    """ASGI middleware of vLLM's API server; the module's docstring says what it adds."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._tap: EngineTap | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        if self._tap is None:
            self._tap = EngineTap(scope["app"].state.engine_client)
        reply = Reply(await self._tap.label(), send)
        token = _generations.set(reply.generations)
        try:
            await self._app(scope, receive, reply.send)
        finally:
            _generations.reset(token)


class Reply:
    """One reply on its way out, with the spans put in."""

    def __init__(self, label: str, send: Send) -> None:
        self.generations: list[Generation] = []
        self._label = label
        self._send = send
        self._stream = False
        self._told = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Stands in for ASGI's send."""
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            self._stream = any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
            headers.append((VERSION_START.encode(), self._label.encode()))
            if not self._stream and self.generations:
                headers.append((VERSIONS.encode(), self._spans().encode()))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and self._stream:
            message = {**message, "body": self._tell(message.get("body", b""), message.get("more_body", False))}
        await self._send(message)

    def _tell(self, body: bytes, more: bool) -> bytes:
        """The comment goes in once: before the end marker, else behind the last byte. vLLM sends whole events."""
        if self._told or not self.generations:
            return body
        at = 0 if body.startswith(b"data: [DONE]") else body.find(b"\ndata: [DONE]") + 1
        if at == 0 and not body.startswith(b"data: [DONE]"):
            if more:
                return body
            at = len(body)
        self._told = True
        return body[:at] + f": {COMMENT} {self._spans()}\n\n".encode() + body[at:]

    def _spans(self) -> str:
        return json.dumps([choice for generation in self.generations for choice in generation.choices])

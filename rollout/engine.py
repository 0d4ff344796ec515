"""The only file that imports vLLM; it runs inside vLLM's own processes. What `rollout.capture` adds to the API server needs no import.

`register` is the `vllm.general_plugins` entry point, loaded in every vLLM process. It adds a weight-transfer backend `disk` that checks
everything before the live model is touched, and a bond to the parent process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.errors import InvalidWeights

if TYPE_CHECKING:
    import torch

BACKEND = "disk"
INVALID = "invalid weights: "
DIE_WITH_PARENT = "CLAWSTREAM_DIE_WITH_PARENT"
WORKER_NICE = "CLAWSTREAM_WORKER_NICE"

Layout = Mapping[str, tuple[str, tuple[int, ...]]]


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

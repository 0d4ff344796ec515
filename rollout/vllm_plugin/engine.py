"""The only file that imports vLLM; it runs inside vLLM's own processes.

The additions of `clawstream.rollout.vllm_plugin.token_capture` to the API server need no import of
vLLM.

`register` is the `vllm.general_plugins` entry point, which vLLM loads in each of its processes. It
adds a weight-transfer backend `disk`, which checks all weights before it changes the live model,
and makes each process die with its parent.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawstream.rollout.errors import InvalidWeights
from clawstream.runtime.digests import safetensors_of_model
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.weights.tensor_file import TensorSlice, read_header

if TYPE_CHECKING:
    import torch

BACKEND = "disk"
INVALID, UNREADABLE = "invalid weights: ", "unreadable weights: "
"""Before the text of an error, because only the text of a worker's error reaches the caller."""
DIE_WITH_PARENT = "CLAWSTREAM_DIE_WITH_PARENT"

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Safetensors dtypes that the engine's loader casts into one another, as for the boot model."""
TIED_HEADS = ("lm_head.weight",)
"""Suffixes of the names of output heads.

In a model with tied embeddings the head is the embedding, saved once or twice.
"""

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name to its dtype (in safetensors spelling) and shape."""


@dataclass(frozen=True, slots=True)
class Served:
    """Requirements for every version.

    Attributes:
        layout: of the tensors that the engine loaded at boot.
        dtype: of the engine.
        tied: whether the output head is the embedding.
        unused: tensors of the boot model that the engine does not load. A version need not have
            them: the trainer's library does not load them either.
    """

    layout: Layout
    dtype: torch.dtype
    tied: bool = False
    unused: Collection[str] = ()


def register() -> None:
    """Register the plugin; the entry point of `vllm.general_plugins`.

    The call is idempotent, because vLLM may repeat it in a process.
    """
    if os.environ.get(DIE_WITH_PARENT):
        _die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _disk_backend())
        _record_loading()


def _record_loading() -> None:
    """Let each model that this process creates remember which tensors it loads."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from clawstream.rollout.vllm_plugin.loaded_tensors import record_first_load

    create = BaseModelLoader.create_model

    @wraps(create)
    def create_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = create(self, *args, **kwargs)
        record_first_load(model)
        return model

    BaseModelLoader.create_model = create_model


def _die_with_parent() -> None:
    """Ask the kernel to send SIGKILL to this process when its parent dies.

    Otherwise a killed API server would leave an engine that holds memory and the device.
    """
    if ctypes.CDLL(None).prctl(1, int(signal.SIGKILL)) == 0 and os.getppid() == 1:
        os._exit(1)  # the parent died before the request to the kernel


def read_layout(model_dir: Path) -> Layout:
    """Read the names, dtypes and shapes of the tensors in a model directory.

    Raises:
        InvalidWeights: the directory holds no readable weights.
    """
    from safetensors import SafetensorError, safe_open

    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in safetensors_of_model(model_dir):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    part = tensors.get_slice(name)
                    layout[name] = (str(part.get_dtype()), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise InvalidWeights(f"{file}: {error}") from error
    if not layout:
        raise InvalidWeights(
            f"{model_dir} has no *.safetensors: the disk backend needs a local model directory"
        )
    return layout


def requirements(
    model_dir: Path, loaded: Collection[str], dtype: torch.dtype, *, tied: bool
) -> Served:
    """Return what an engine requires of versions.

    Args:
        model_dir: that it booted from.
        loaded: names of the tensors that it loaded. If none is in the files (it was not recorded,
            or they are the same weights under other names), all tensors of the files count.
        dtype, tied: see `Served`.

    Raises:
        InvalidWeights: the directory holds no readable weights.
    """
    layout = read_layout(model_dir)
    required = {name: tensor for name, tensor in layout.items() if name in loaded} or layout
    return Served(required, dtype, tied, layout.keys() - required.keys())


def stage(files: Collection[str], served: Served) -> dict[str, torch.Tensor]:
    """Read safetensors into memory and check names, dtypes, shapes and finiteness.

    The worker has checked the digests. Each file is read tensor by tensor, so one copy of them is
    in memory. A float tensor may have another float dtype than in the boot model:
    the loader casts it exactly as at boot, so the served values are equal whether the trainer or
    the engine rounds. Other dtypes (integers, 8-bit floats with scales) must be equal.

    Args:
        files: path of each file.
        served: the model that the version must fit.

    Returns:
        Name to tensor in the dtype of the file, without a redundant copy of a tied embedding.

    Raises:
        InvalidWeights: a tensor does not fit. The message names it.
        WeightsUnreadable: a file is missing, damaged or no safetensors file.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(files):
        try:
            for part, tensor in _read_tensors(path):
                found[part.name], weights[part.name] = (part.dtype, part.shape), tensor
        except (OSError, ValueError, KeyError) as error:
            raise WeightsUnreadable(f"{path}: {error}") from error
    expected = dict(served.layout)
    if served.tied:
        _drop_tied_heads(weights)
        found = {name: found[name] for name in weights}
        expected = {
            name: tensor for name, tensor in expected.items() if not name.endswith(TIED_HEADS)
        }
    found = {name: tensor for name, tensor in found.items() if name not in served.unused}
    if difference := _difference(found, expected):
        raise InvalidWeights(f"not the tensors of the model that is served: {difference}")
    check_finite(weights, served.dtype)
    return weights


def _read_tensors(path: str) -> Iterator[tuple[TensorSlice, torch.Tensor]]:
    """Yield the tensors of a file. They are invalid unless the iterator ends.

    Raises:
        OSError, ValueError, KeyError: it is no whole safetensors file.
    """
    import torch
    from safetensors.torch import _getdtype

    with Path(path).open("rb") as file:
        _, parts = read_header(file)
        for part in parts:
            dtype, data = _getdtype(part.dtype), torch.empty(part.size_bytes, dtype=torch.uint8)
            if part.size_bytes != math.prod(part.shape) * dtype.itemsize:
                raise ValueError(f"{part.name} has {part.size_bytes} bytes")
            if file.readinto(data.numpy().data) < part.size_bytes:
                raise ValueError(f"it ends within {part.name}")
            yield part, data.view(dtype).reshape(part.shape)
        if file.read(1):
            raise ValueError("it goes on behind the last tensor")


def check_finite(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raise InvalidWeights when a value is not finite in the served dtype."""
    import torch

    broken = [
        name
        for name, tensor in weights.items()
        if not torch.isfinite(_as_served(tensor, dtype)).all()
    ]
    if broken:
        raise InvalidWeights(f"values that are not finite in {dtype} in {broken[:3]}")


def head_is_shared(model: torch.nn.Module) -> bool:
    """Return whether the output head has its weight in common with another module."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    owners = Counter(id(parameter) for _, parameter in parameters)
    return any(owners[id(p)] > 1 for name, p in parameters if name.endswith(TIED_HEADS))


def _drop_tied_heads(weights: dict[str, torch.Tensor]) -> None:
    """Remove the output head of a model that ties it to its embedding.

    Raises:
        InvalidWeights: the head differs from the embedding.
    """
    import torch

    for name in [n for n in weights if n.endswith(TIED_HEADS)]:
        head = weights.pop(name)
        if not any(t.shape == head.shape and torch.equal(t, head) for t in weights.values()):
            raise InvalidWeights(
                f"{name} is not the embedding, but the served model ties both: it would be ignored"
            )


def _as_served(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _difference(found: Layout, expected: Layout) -> str:
    """Describe the tensors that do not fit; empty when all fit."""
    kinds = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys()),
        "other dtype or shape": sorted(
            n for n in found.keys() & expected.keys() if not _can_load(found[n], expected[n])
        ),
    }
    return "; ".join(
        f"{kind}: {', '.join(names[:3])} ({len(names)})" for kind, names in kinds.items() if names
    )


def _can_load(found: tuple[str, tuple[int, ...]], expected: tuple[str, tuple[int, ...]]) -> bool:
    """Return whether a tensor of this dtype and shape can replace the expected one."""
    return found[1] == expected[1] and (
        found[0] == expected[0] or {found[0], expected[0]} <= FLOATS
    )


def adapter_request(name: str, number: int, directory: str) -> Any:
    """Return vLLM's request for a LoRA adapter. number: from 1, never used twice in an engine."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=directory)


def _disk_backend() -> type[Any]:
    """Return the backend's class, created on demand to keep the import of this module light."""
    from dataclasses import dataclass, field

    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    from clawstream.rollout.vllm_plugin.loaded_tensors import loaded_tensors

    @dataclass
    class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
        """No initialisation parameters: versions are files."""

    @dataclass
    class Files(WeightTransferUpdateInfo):  # type: ignore[misc]
        """Absolute path of each safetensors file."""

        files: list[str] = field(default_factory=list)

    class Disk(WeightTransferEngine):  # type: ignore[misc]
        """Load weights in three phases: start, update and finish.

        start clears the staged weights; update reads weights into memory and checks them; finish
        loads them into the model.

        An error before finish leaves the model unchanged, so the caller does not need to pause the
        engine for it. An error in finish leaves the model partly updated, and the engine must be
        restarted.
        """

        init_info_cls, update_info_cls = NoInit, Files
        staged: dict[str, torch.Tensor] | None = None
        served: Served | None = None

        def init_transfer_engine(self, init_info: NoInit) -> None:
            """Do nothing."""

        def start_weight_update(self) -> None:
            self.staged = None
            if self.served is None:
                config = self.model_config
                tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
                # If the boot model's files have a head, vLLM turns the setting off, loads the head
                # and ties it again if it is the embedding.
                tied = bool(tied) or head_is_shared(self.model)
                loaded = loaded_tensors(self.model)
                self.served = requirements(Path(config.model), loaded, config.dtype, tied=tied)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class synchronises the accelerator after this call; a CPU worker has none.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Files) -> None:
            if self.served is None:
                raise RuntimeError("update_weights before start_weight_update")
            try:
                self.staged = stage(update_info.files, self.served)
            except InvalidWeights as error:
                raise RuntimeError(f"{INVALID}{error}") from error
            except WeightsUnreadable as error:
                raise RuntimeError(f"{UNREADABLE}{error}") from error

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
    """Repack tied output heads from the new weights.

    vLLM 0.32 on CPU keeps the packed copy of a *tied* output head across a reload.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if (
            isinstance(module, VocabParallelEmbedding)
            and hasattr(module, "cpu_linear")
            and module.weight.numel()
        ):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)

"""Shard a model over processes with FSDP2, and gather its weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from clawstream.trainer.parallel.processes import Processes


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer that are sharded and checkpointed one by one."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_activations(model: nn.Module) -> None:
    """Keep the inputs of each layer only, and compute the layer again in the backward pass.

    transformers does this in training mode only, which also turns dropout on.
    """
    for layer in layers_of(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(model: nn.Module) -> None:
    """Let torch compile each layer at its first pass; equal layers share the code.

    Do it before `shard`: FSDP's own work stays outside of the compiled code.
    """
    for layer in layers_of(model):
        layer.compile()


def shard(model: nn.Module, processes: Processes, device: torch.device) -> None:
    """Leave on each process its shard of every weight; the whole weights exist during a pass.

    The shards are on `device`; the model may be on the CPU. Make the optimiser afterwards: the
    parameters are new.
    """
    if processes.size == 1:
        return
    mesh = init_device_mesh(device.type, (processes.size,))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    # The weights outside the layers, too, are sharded after a forward pass: outside of a pass every
    # reader finds shards.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor from its shards; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameter_ids(model: nn.Module) -> dict[str, Any]:
    """Return an id for each parameter name; tied parameters have the same."""
    return {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}

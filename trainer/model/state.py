"""The parts of a checkpoint: weights, AdamW, random states, each as a `Stateful` of torch.

Tensors are handed out by reference, named by parameter: `torch.distributed.checkpoint` writes each
process's shards of them, and reads into them in place. So the same parts serve one process and
several (`fully_shard`), full models and adapters.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn


class ModelState:
    """The parameters of a model and its persistent buffers; tied parameters once."""

    def __init__(self, model: nn.Module, *, trained_only: bool = False) -> None:
        """trained_only: leave out what is frozen, for an adapter."""
        self._model, self._trained_only = model, trained_only

    def state_dict(self) -> dict[str, Tensor]:
        if self._trained_only:
            return {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        persistent = self._model.state_dict().keys()
        buffers = {n: b for n, b in self._model.named_buffers() if n in persistent}
        return dict(self._model.named_parameters()) | buffers

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the tensors were read in place."""


class OptimizerState:
    """The moments and step counts of AdamW by name of the parameter.

    Learning rate, betas and weight decay are settings; the settings of the resume count.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Create the state that AdamW otherwise creates at its first step, with equal values."""
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        self._moments: dict[str, dict[str, Tensor]] = {}
        for name, parameter in model.named_parameters():
            if parameter in trained:
                state = optimizer.state[parameter]
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                self._moments[name] = state

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {name: dict(state) for name, state in self._moments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the tensors were read in place."""


class RandomState:
    """The random states of torch on the CPU and on the CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, bytes]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        data = io.BytesIO()
        torch.save(states, data)
        return {"states": data.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = torch.load(io.BytesIO(state["states"]), weights_only=True)
        torch.set_rng_state(states["cpu"])
        if self._device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self._device)

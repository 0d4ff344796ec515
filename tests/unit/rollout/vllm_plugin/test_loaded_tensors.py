"""What a model of vLLM loads is seen by what it does with the tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from clawstream.rollout.vllm_plugin.loaded_tensors import loaded_tensors, record_first_load


class Model(torch.nn.Module):
    """Loads as models of vLLM do: into slices, of several tensors at once, and not everything."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(3, 2))
        self.gate = torch.nn.Parameter(torch.zeros(2, 2))
        self.scale = torch.nn.Parameter(torch.zeros(()))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        experts = []
        for name, tensor in weights:
            if name.startswith("mtp.") or tensor.dtype == torch.int64 or tensor.numel() > 100:
                continue
            if name in ("q", "k"):
                self.qkv.data.narrow(0, "qk".index(name), 1).copy_(tensor)
            elif name == "scale":
                self.scale.data.fill_(tensor.item())
            elif name.startswith("expert"):
                experts.append(tensor)
        if experts:
            self.gate.data.copy_(torch.cat(experts))
        return {"qkv", "gate", "scale"}


def test_tensors_count_as_loaded_when_the_model_uses_them() -> None:
    model, one = Model(), torch.ones(1, 2)
    weights = {
        "q": one,
        "k": one + 1,
        "expert.0": one + 2,
        "expert.1": one + 3,
        "scale": torch.tensor(5.0),
        "mtp.fc": one + 4,
        "table": torch.ones(200),
        "ids": torch.ones(1, dtype=torch.int64),
    }
    record_first_load(model)
    assert not loaded_tensors(model)
    assert model.load_weights((n, t.clone()) for n, t in weights.items()) == {
        "qkv", "gate", "scale",
    }  # fmt: skip
    assert loaded_tensors(model) == {"q", "k", "expert.0", "expert.1", "scale"}
    assert model.qkv.tolist() == [[1, 1], [2, 2], [0, 0]] and model.scale == 5
    assert model.gate.tolist() == [[3, 3], [4, 4]]
    model.load_weights([("q", one)])  # a version: nothing is recorded
    assert loaded_tensors(model) == {"q", "k", "expert.0", "expert.1", "scale"}

"""Which tensors of its files a model loads.

Published models have tensors that an engine does not load: layers for speculative decoding, tables
that it computes itself. What loads them knows, and says so by using them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_ATTRIBUTE = "clawstream_loaded_tensors"
_MEASURES = frozenset({"size", "dim", "numel"})


def record_first_load(model: Any) -> None:
    """Let a model remember which tensors its next `load_weights` uses.

    Args:
        model: a module of vLLM, with `load_weights(weights: Iterable[(name, tensor)])`.
    """
    load = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *more: Any, **named: Any) -> Any:
        del model.load_weights  # of the instance
        used = _Used()
        with used:
            found = load(used.named(weights), *more, **named)
        setattr(model, _ATTRIBUTE, frozenset(used.names))
        return found

    model.load_weights = load_weights


def loaded_tensors(model: Any) -> Collection[str]:
    """Return the names of the tensors that a model has loaded; empty if it was not recorded."""
    found: frozenset[str] = getattr(model, _ATTRIBUTE, frozenset())
    return found


class _Used(TorchFunctionMode):
    """Record the names of the tensors that an operation of torch reads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._tensors = WeakTensorKeyDictionary()

    def named(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield named tensors, and watch them."""
        for name, tensor in weights:
            self._tensors[tensor] = name
            yield name, tensor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        getter = func.__name__ == "__get__" and not isinstance(found, torch.Tensor)
        if not getter and func.__name__ not in _MEASURES:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and value in self._tensors:
                    self.names.add(self._tensors[value])
        return found

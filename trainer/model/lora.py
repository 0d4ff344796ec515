"""Low-rank adapters of a frozen model (Hu et al. 2021, arXiv:2106.09685), by peft."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from clawstream.runtime.weights.tensor_file import with_sorted_header
from clawstream.schemas.errors import SettingsError
from clawstream.trainer.model.files import head_is_tied, set_tied
from clawstream.trainer.parallel.sharding import whole
from clawstream.trainer.vision.inputs import has_vision

if TYPE_CHECKING:
    from peft import PeftModel

    from clawstream.schemas.settings import LoraSettings

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BASE = "base_model"
IDENTITY = "lora.json"
"""File of a checkpoint's model directory: settings of the adapter and digest of its base."""


def with_adapter(model: Any, settings: LoraSettings, base: Path) -> PeftModel:
    """Add a new adapter to a model in place and freeze all other weights.

    The new adapter changes no output: its second matrix is zero. A vision-language model gets it in
    its language model only: vLLM serves no other adapters by default.

    Args:
        model: of transformers.
        settings: with a rank.
        base: directory of the model; users of the adapter find it by this path.

    Raises:
        SettingsError: the model has no such layers.
    """
    from peft import LoraConfig, get_peft_model

    assert settings.rank is not None
    names = list(settings.target_modules)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number
        lora_dropout=0.0,
        target_modules=names[0] if names == ["all-linear"] else names,
        exclude_modules=_outside_language_model(model) if has_vision(model.config) else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as e:
        raise SettingsError(f"setting trainer.lora.target_modules={names}: {e}") from e


def _outside_language_model(model: Any) -> str:
    """Return a pattern of the names of all modules that are not in the language model."""
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(name)}\.).*"


def save_adapter(
    adapter: PeftModel,
    directory: Path,
    dtype: torch.dtype,
    base_model: str,
    *,
    writes: bool = True,
) -> None:
    """Write an adapter in peft's format. Every process that has a shard of it must call this.

    Args:
        adapter: of a model.
        directory: the target.
        dtype: its weights are rounded to it.
        base_model: digest of the model; it is in the metadata of the weights.
        writes: whether this process writes.
    """
    from peft import get_peft_model_state_dict

    state = {
        name: whole(tensor.detach()).to("cpu", dtype).contiguous()
        # The embedding and the head of the base are frozen: they are not part of the adapter.
        for name, tensor in get_peft_model_state_dict(adapter, save_embedding_layers=False).items()
    }
    if not writes:
        return
    directory.mkdir(parents=True, exist_ok=True)
    content = save(state, {"format": "pt", _BASE: base_model})
    (directory / WEIGHTS).write_bytes(with_sorted_header(content))
    config: Any = copy.copy(adapter.peft_config["default"])
    config.inference_mode = True
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(directory))


def save_identity(directory: Path, settings: LoraSettings, base_model: str) -> None:
    """Write what `check_identity` reads."""
    identity = {"settings": settings.model_dump(mode="json"), "base_model": base_model}
    (directory / IDENTITY).write_text(json.dumps(identity))


def check_identity(directory: Path, settings: LoraSettings, base_model: str | None) -> None:
    """Refuse a resume with other trained weights than those of the checkpoint.

    Args:
        directory: of the checkpoint's model.
        settings: of this start.
        base_model: digest of the model at trainer.model_path; None: all weights are trained.

    Raises:
        SettingsError: the settings of the adapter, or its base, are others.
    """
    path = directory / IDENTITY
    stored = json.loads(path.read_text()) if path.exists() else None
    now = settings.model_dump(mode="json") if settings.rank is not None else None
    before = None if stored is None else stored["settings"]
    if before != now:
        raise SettingsError(
            f"settings trainer.lora: {now or 'none'}, but the run was begun with "
            f"{before or 'none: it trains all weights'}; keep them, or use another run_id"
        )
    if stored is not None and base_model is not None and stored["base_model"] != base_model:
        raise SettingsError(
            "setting trainer.model_path: its weights are not the base of the run's adapter "
            f"(digest {base_model}, in {path} {stored['base_model']}); give the path of that base"
        )


def base_of(directory: Path) -> str:
    """Return the digest of the model that a saved adapter belongs to."""
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        return str(file.metadata()[_BASE])


def merged(model: Any, directory: Path) -> Any:
    """Return a float32 model with the products of a saved adapter added to its weights.

    If the adapter is on the output head or on the embedding of a model that ties both, the result
    has two tensors: the adapter changes the layer that has it, and not the other.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    tied = head_is_tied(model)
    adapted = PeftModel.from_pretrained(model, directory)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if tied and (isinstance(head, BaseTunerLayer) or isinstance(embedding, BaseTunerLayer)):
        own: Any = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
        own.weight = torch.nn.Parameter(own.weight.clone())
        set_tied(model.config, False)
    return adapted.merge_and_unload()

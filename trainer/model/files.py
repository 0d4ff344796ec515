"""Read and write a model as a Hugging Face directory.

It is loaded as float32 master weights and saved in the requested dtypes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from clawstream.schemas.errors import SettingsError
from clawstream.trainer.parallel.sharding import parameter_ids, whole
from clawstream.trainer.vision.inputs import has_vision

FACTS = "model_facts.json"
"""File of a checkpoint's model directory, about the model that the run began with: its dtypes, and
whether its output head is its embedding.
"""
GENERATION = "generation_config.json"
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""Suffixes of a model's files besides its weights: configuration, tokenizer, chat template."""


MEDIA = ("image", "video", "audio")


@dataclass(frozen=True, slots=True)
class TensorDtypes:
    """The dtypes of a published model. others: by name, for tensors with a different dtype."""

    main: torch.dtype
    others: Mapping[str, torch.dtype]

    def of(self, name: str) -> torch.dtype:
        return self.others.get(name, self.main)


def load_masters(
    directory: Path, setting: str = "trainer.model_path", *, needs_head: bool = True
) -> tuple[Any, TensorDtypes]:
    """Load a model as float32 for any dtype of its files: a narrower dtype loses small updates.

    Args:
        directory: a Hugging Face directory.
        setting: that names it, for errors.
        needs_head: whether the output head is used, so that the files must have it.

    Returns:
        The model, and the dtypes of its own configuration.

    Raises:
        SettingsError: the directory holds no readable model, or not all of its tensors: the others
            would begin at random.
    """
    if not (directory / "config.json").is_file():
        raise SettingsError(
            f"setting {setting}: {directory} is no Hugging Face model directory "
            "(no readable config.json in it)"
        )
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        model, loading = auto_class(config).from_pretrained(
            directory,
            dtype="auto",
            local_files_only=True,
            generation_config=GenerationConfig(),  # nothing is generated: the file is not read
            output_loading_info=True,
        )
        body = f"{model.base_model_prefix}."
        absent = sorted(n for n in loading["missing_keys"] if needs_head or n.startswith(body))
        if absent:
            raise ValueError(
                f"its files lack {len(absent)} tensors of {type(model).__name__}, for example "
                f"{', '.join(absent[:3])}; config.json describes another model"
            )
        set_tied(model.config, head_is_tied(model))
        main, tensors = model.config.dtype, model.state_dict()
        own = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
        others = {name: dtype for name, dtype in own.items() if dtype != main}
        return model.float(), TensorDtypes(main, others)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:
        raise SettingsError(
            f"setting {setting}: the model in {directory} can't be loaded: {e}"
        ) from e


def empty_masters(directory: Path) -> tuple[Any, TensorDtypes]:
    """Return the model of a directory from `save_configuration` with uninitialized weights."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    names = json.loads((directory / FACTS).read_text())
    set_tied(config, names["tied"])
    with no_init_weights():
        model = auto_class(config).from_config(config, dtype=torch.float32)
    model.tie_weights()
    model.generation_config = GenerationConfig()
    others = {name: getattr(torch, dtype) for name, dtype in names["others"].items()}
    return model, TensorDtypes(getattr(torch, names["main"]), others)


def head_is_tied(model: Any) -> bool:
    """Return whether the output head of a model is its embedding: one tensor with two names.

    The files of a model decide it: transformers and vLLM tie both unless the configuration says no,
    or the files have a head that differs from the embedding.
    """
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def set_tied(config: Any, tied: bool) -> None:
    """Let a configuration state whether the output head is the embedding."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class that loads a model: with its vision tower, if it has one."""
    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def save_configuration(
    directory: Path, auxiliary: Mapping[str, bytes], dtypes: TensorDtypes, config: Any
) -> None:
    """Write what `empty_masters` and `auxiliary_files` read.

    Args:
        directory: it is created.
        auxiliary: the files of `auxiliary_files`; the configuration is one of them.
        dtypes: of the model that the run began with.
        config: of the model. The file of the configuration may say wrongly that the head is tied.
    """
    directory.mkdir(parents=True)
    for name, content in auxiliary.items():
        (directory / name).write_bytes(content)
    others = {name: _name(dtype) for name, dtype in dtypes.others.items()}
    facts = {"main": _name(dtypes.main), "others": others, "tied": config.tie_word_embeddings}
    (directory / FACTS).write_text(json.dumps(facts))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def save_rounded(model: Any, directory: Path, dtypes: TensorDtypes, *, writes: bool = True) -> None:
    """Write the weights rounded to these dtypes, and a configuration that names the dtypes.

    The model stays unchanged. Every process that has a shard of it must call this. The other files
    of a model are copied: see `auxiliary_files`.

    Args:
        model: of transformers.
        directory: the target.
        dtypes: of the files.
        writes: whether this process writes; the others only give their shards.
    """
    ids, state = parameter_ids(model), dict[str, torch.Tensor]()
    rounded: dict[int, torch.Tensor] = {}  # tied tensors stay one tensor
    for name, tensor in model.state_dict().items():
        key = ids.get(name, id(tensor))
        if key not in rounded:
            dtype = dtypes.of(name) if tensor.is_floating_point() else tensor.dtype
            full = whole(tensor)
            rounded[key] = full.to("cpu", dtype) if writes else full.new_empty(0)
        state[name] = rounded[key]
    if not writes:
        return
    model.save_pretrained(directory, state_dict=state)
    config = copy.deepcopy(model.config)
    config.dtype = dtypes.main
    config.save_pretrained(directory)
    (directory / GENERATION).unlink(missing_ok=True)  # of transformers; it was not read


def media_placeholders(config: Any) -> frozenset[int]:
    """Return the ids of tokens that stand for parts of images, videos and sounds.

    Args:
        config: a model's configuration. That of a text model names none.
    """
    names = [f"{kind}_token_{end}" for kind in MEDIA for end in ("id", "index")]
    return frozenset(i for name in names if isinstance(i := getattr(config, name, None), int))


def auxiliary_files(directory: Path) -> dict[str, bytes]:
    """Read the tokenizer and the other auxiliary files.

    They are read once, because the directory may be a checkpoint that is deleted later.
    """
    return {
        file.name: file.read_bytes()
        for file in sorted(directory.iterdir())
        if file.is_file()
        and file.suffix in TEXT_SUFFIXES
        and not file.name.endswith(".index.json")
        and file.name != FACTS
    }

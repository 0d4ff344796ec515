"""Directories of published models: what is loaded, refused, copied and served."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from clawstream.rollout.errors import InvalidWeights
from clawstream.rollout.vllm_plugin.engine import requirements, stage
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.model.policy import Policy

SHAPE: Mapping[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
LINEAR: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
Make = Callable[..., Any]


def llama(**more: Any) -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, **more))


def qwen3_5() -> Any:
    return tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**SHAPE, **LINEAR))


def qwen3_next() -> Any:
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**SHAPE, **LINEAR, **EXPERTS))


def written(directory: Path, make: Make, **more: torch.Tensor) -> Path:
    """Write a model with more tensors in its file; names have __ for a dot."""
    torch.manual_seed(0)
    make().save_pretrained(directory)
    (directory / "notes.txt").write_text("kept")
    file = directory / "model.safetensors"
    added = {name.replace("__", "."): tensor.clone() for name, tensor in more.items()}
    save_file(load_file(file) | added, file, {"format": "pt"})
    return directory


def policy_of(directory: Path, **more: Any) -> Policy:
    return Policy(directory, TrainerSettings.model_validate({"device": "cpu", **more}))


def saved(policy: Policy, out: Path) -> list[str]:
    """Publish a policy; return what `stage` reads."""
    policy.save(out, policy.served_dtypes("auto"))
    return [str(file) for file in out.glob("*.safetensors")]


SPARE = torch.ones(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (qwen3_next, {"mtp__fc__weight": SPARE, "mtp__layers__0__input_layernorm__weight": SPARE}),
        (qwen3_5, {"mtp__fc__weight": SPARE}),
        (llama, {"model__layers__0__self_attn__rotary_emb__inv_freq": SPARE}),
        (llama, {"model__layers__2__input_layernorm__weight": SPARE}),
    ],
)
def test_a_version_need_not_have_what_the_engine_does_not_load(
    tmp_path: Path, make: Make, more: dict[str, torch.Tensor]
) -> None:
    """Layers for speculative decoding, tables that are computed: the trainer has none of them."""
    boot = written(tmp_path / "boot", make, **more)
    files = saved(policy_of(boot), tmp_path / "out")
    spare = {name.replace("__", ".") for name in more}
    loaded = load_file(boot / "model.safetensors").keys() - spare
    needed = requirements(boot, loaded, torch.float32, tied=False)
    assert stage(files, needed).keys() == loaded
    with pytest.raises(InvalidWeights, match="missing: "):  # an engine that loads them
        stage(files, requirements(boot, loaded | spare, torch.float32, tied=False))
    whole = [str(file) for file in boot.glob("*.safetensors")]
    assert stage(whole, needed).keys() == loaded | spare
    (tmp_path / "without").mkdir()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if "embed" not in n},
        tmp_path / "without" / "model.safetensors",
    )
    (file,) = (tmp_path / "without").iterdir()
    with pytest.raises(InvalidWeights, match=r"missing: model\.embed_tokens\.weight \(1\)"):
        stage([str(file)], needed)


@pytest.mark.parametrize("other", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_files_beside_those_of_the_model_are_none_of_its_weights(
    tmp_path: Path, other: str
) -> None:
    boot = written(tmp_path / "boot", llama)
    save_file({"layers.0.attention.wq.weight": SPARE}, boot / other)
    files = saved(policy_of(boot), tmp_path / "out")
    for loaded in ((), ("layers.0.attention.wq.weight",), load_file(boot / "model.safetensors")):
        assert stage(files, requirements(boot, loaded, torch.float32, tied=False))


@pytest.mark.parametrize(
    "content",
    [
        b'{"temperature": 0.9, "top_p": 0.6, "eos_token_id": 1}',
        b'{"do_sample": false, "temperature": 0.1, "of another release": [1]}',
        b"no JSON",
        None,
    ],
)
def test_files_that_only_pass_through_are_copied_and_not_read(
    tmp_path: Path, content: bytes | None
) -> None:
    boot, name = written(tmp_path / "boot", llama), "generation_config.json"
    (boot / name).unlink()
    if content is not None:
        (boot / name).write_bytes(content)
    policy = policy_of(boot)
    saved(policy, tmp_path / "out")
    policy.save_configuration(tmp_path / "checkpoint")
    restored = Policy(tmp_path / "checkpoint", policy.settings, weights=False)
    saved(restored, tmp_path / "later")
    for directory in (tmp_path / "out", tmp_path / "later"):
        found = directory / name
        assert (found.read_bytes() if found.exists() else None) == content
        assert (directory / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("says", "head", "ties"),
    [
        (True, "absent", True),
        (True, "the embedding", True),
        (True, "another", False),
        (False, "the embedding", False),
        (False, "another", False),
    ],
)
def test_the_files_decide_whether_the_head_is_the_embedding(
    tmp_path: Path, says: bool, head: str, ties: bool
) -> None:
    """The configuration of what is published and of a resume says what the model does."""
    boot = written(tmp_path / "boot", lambda: llama(tie_word_embeddings=head == "absent"))
    tensors = load_file(boot / "model.safetensors")
    if head == "the embedding":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, boot / "model.safetensors", {"format": "pt"})
    config = json.loads((boot / "config.json").read_text()) | {"tie_word_embeddings": says}
    (boot / "config.json").write_text(json.dumps(config))
    policy = policy_of(boot)
    policy.save_configuration(tmp_path / "checkpoint")
    restored = Policy(tmp_path / "checkpoint", policy.settings, weights=False)
    for place, one in enumerate((policy, restored)):
        assert (one.model.lm_head.weight is one.model.model.embed_tokens.weight) == ties
        assert one.state["model"].state_dict().keys() == policy.state["model"].state_dict().keys()
        out = tmp_path / f"out{place}"
        saved(one, out)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == ties
        assert ("lm_head.weight" in load_file(out / "model.safetensors")) != ties


@pytest.mark.parametrize("change", ["no head", "other names"])
def test_files_of_another_model_than_the_configuration_are_refused(
    tmp_path: Path, change: str
) -> None:
    """What the files lack would begin at random."""
    boot = written(tmp_path / "boot", llama)
    tensors = load_file(boot / "model.safetensors")
    if change == "no head":
        del tensors["lm_head.weight"]
    else:
        tensors = {f"language_{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, boot / "model.safetensors", {"format": "pt"})
    lacks = r"trainer\.model_path: .*its files lack \d+ tensors of LlamaForCausalLM, .*lm_head"
    with pytest.raises(SettingsError, match=lacks):
        policy_of(boot)

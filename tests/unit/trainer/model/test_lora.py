"""Adapters: what is trained, published, resumed and merged."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.parallel_training import sequences
from transformers import AutoModelForCausalLM

from clawstream.demo.model import make_random_model
from clawstream.runtime.digests import digest_of_model
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import Version
from clawstream.schemas.settings import Settings
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.model.files import TensorDtypes, load_masters, save_rounded
from clawstream.trainer.model.lora import CONFIG, WEIGHTS, check_identity, merged
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import update
from clawstream.trainer.position import Position
from clawstream.trainer.versions.directory import VersionState, new_directory
from clawstream.trainer.versions.save_model import save_model

VERSION = Version("r", 1, 0)


def settings(model: Path, data_dir: Path, **lora: object) -> Settings:
    trainer = {"model_path": model, "device": "cpu", "lora": {"rank": 4, **lora}}
    return Settings.model_validate({"run_id": "r", "data_dir": data_dir, "trainer": trainer})


@pytest.mark.slow
def test_an_adapter_is_trained_published_and_merged(tmp_path: Path) -> None:
    base = make_random_model(tmp_path / "model")
    s = settings(base, tmp_path / "data")
    policy = Policy(base, s.trainer)
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    rows = sequences(0)
    batch = collate(rows, 1.0, policy.device)
    plain = Policy(base, settings(base, tmp_path, rank=None).trainer).logprobs(batch)
    assert torch.equal(policy.logprobs(batch), plain)  # a new adapter changes nothing
    update(policy, rows, 0, load("cispo", {}, ()), 1e-2, None)
    changed = {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in name for name in changed)
    state = VersionState(
        version=VERSION,
        parent_version=None,
        weights_topic_id="w",
        position=Position(topic_id="t", next_offset=1, next_batch_seq=1),
    )
    with new_directory(Path(s.weights_uri), state) as directory:
        policy.save(directory, TensorDtypes(torch.float32, {}))
    published = Path(s.weights_uri) / "r" / "1.0"
    assert {path.name for path in published.iterdir()} == {CONFIG, WEIGHTS, "clawstream.json"}
    row = rows[0].tokens
    with torch.no_grad():
        ids = torch.from_numpy(row.ids.astype(np.int64)).unsqueeze(0)
        own = policy.model(ids).logits
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), published)
        assert torch.allclose(peft(ids).logits, own, atol=1e-6)
        save_model(s, str(VERSION), tmp_path / "merged")
        one = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(one(ids).logits, own, atol=1e-5)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == (
        load_file(base / "model.safetensors").keys()
    )
    with pytest.raises(SettingsError, match=r"no version r/7\.0"):
        save_model(s, "r/7.0", tmp_path / "other")
    other = make_random_model(tmp_path / "base of others", seed=1)
    with pytest.raises(SettingsError, match="is not the model"):
        save_model(settings(other, tmp_path / "data"), str(VERSION), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.slow
def test_a_resume_with_another_adapter_or_base_is_refused(tmp_path: Path) -> None:
    base = make_random_model(tmp_path / "model")
    s = settings(base, tmp_path).trainer
    digest = digest_of_model(base)
    Policy(base, s).save_configuration(tmp_path / "saved")
    check_identity(tmp_path / "saved", s.lora, digest)
    with pytest.raises(SettingsError, match=r"trainer\.lora: .*'rank': 8.*begun with .*'rank': 4"):
        check_identity(tmp_path / "saved", settings(base, tmp_path, rank=8).trainer.lora, digest)
    with pytest.raises(SettingsError, match=r"trainer\.lora: none"):
        check_identity(tmp_path / "saved", settings(base, tmp_path, rank=None).trainer.lora, None)
    with pytest.raises(SettingsError, match=r"trainer\.model_path"):
        check_identity(tmp_path / "saved", s.lora, "0" * 64)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_an_adapter_on_one_name_of_a_shared_tensor_does_not_change_the_other(
    tmp_path: Path, names: list[str]
) -> None:
    base = tied_model(tmp_path / "model")
    s = settings(base, tmp_path / "data", target_modules=[*names, "q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's, of what is tested here
        policy = Policy(base, s.trainer)
        update(policy, sequences(0), 0, load("cispo", {}, ()), 1e-2, None)
        policy.save(tmp_path / "adapter", TensorDtypes(torch.float32, {}))
        model, dtypes = load_masters(base)
        save_rounded(merged(model, tmp_path / "adapter"), tmp_path / "merged", dtypes)
    assert all("lora" in name for name in load_file(tmp_path / "adapter" / WEIGHTS))
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        own = policy.model(ids).logits
        one = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(one(ids).logits, own, atol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(base)
        assert not torch.allclose(plain(ids).logits, own, atol=1e-2)
    assert not one.config.tie_word_embeddings


def test_an_adapter_is_the_same_bytes_whenever_it_is_written(tmp_path: Path) -> None:
    base = make_random_model(tmp_path / "model")
    policy = Policy(base, settings(base, tmp_path).trainer)
    found = set()
    for place in range(8):
        policy.save(tmp_path / str(place), TensorDtypes(torch.float32, {}))
        found.add((tmp_path / str(place) / WEIGHTS).read_bytes())
    assert len(found) == 1


def tied_model(directory: Path) -> Path:
    make_random_model(directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    file = directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if n != "lm_head.weight"}
    save_file(tensors, file, {"format": "pt"})
    return directory


def test_layers_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    base = make_random_model(tmp_path / "model")
    with pytest.raises(SettingsError, match=r"trainer\.lora\.target_modules"):
        Policy(base, settings(base, tmp_path, target_modules=["nothing"]).trainer)

"""A vision-language model as the policy of a run."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from support.trainer_runs import MemoryWeightLog, add_turn_with_images, begin, fetched, settings
from support.vision_model import IMAGE, IMAGE_TOKENS, encoded, image_of, make_vision_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from clawstream.demo.model import make_random_model
from clawstream.runtime.blob_store import BlobStore
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.run import Run
from clawstream.trainer.step import train_batch

RED = base64.b64decode(encoded(image_of("red")))


@pytest.fixture(scope="module")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "model"
    make_vision_model(directory)
    return directory


@pytest.fixture(scope="module")
def placeholders(vision_dir: Path) -> list[int]:
    processor = AutoProcessor.from_pretrained(vision_dir)
    return [int(processor.tokenizer.convert_tokens_to_ids(IMAGE))] * IMAGE_TOKENS


def read(run: Run, given: FetchedBatch) -> FetchedBatch:
    assert run.read_images is not None
    return replace(given, images=run.read_images(given.batch, given.trajectories))


def tensors(run: Run) -> dict[str, torch.Tensor]:
    assert run.current_version is not None
    version = run.versions[-1]
    path = next(f.url for f in version.files if f.url.endswith("model.safetensors"))
    return load_file(path.removeprefix("file://"))


@pytest.mark.slow
def test_images_are_trained_and_the_version_is_a_vision_model(
    tmp_path: Path, vision_dir: Path, placeholders: list[int]
) -> None:
    s, log = settings(tmp_path, vision_dir), MemoryWeightLog()
    BlobStore(s.blob_uri).put(RED)
    run = begin(s, log)
    before, given = tensors(run), fetched(0)
    assert before.keys() == load_file(vision_dir / "model.safetensors").keys()
    seen, lost, *_ = given.trajectories
    add_turn_with_images(given, seen, placeholders, RED)
    add_turn_with_images(given, lost, placeholders, b"not in the store")
    with capture_logs() as logs:
        train_batch(run, read(run, given))
    run.publish()
    (said,) = (line for line in logs if line["event"] == "media_not_trained")
    assert said["trajectories"] == [lost] and "no blob" in said["reasons"][0]
    metrics = run.versions[-1].metrics
    assert (metrics["tokens_with_media"], metrics["tokens"]) == (2.0, 6 * 4 + 2.0)
    after = tensors(run)
    assert all(
        any(not torch.equal(after[n], t) for n, t in before.items() if part in n)
        for part in ("vision_tower", "multi_modal_projector", "language_model")
    )
    directory = Path(s.weights_uri.removeprefix("file://")) / "r" / "1.0"
    AutoModelForImageTextToText.from_pretrained(directory)
    AutoProcessor.from_pretrained(directory)
    run._checkpoints.wait()

    resumed, given = begin(s, log), fetched(1)
    add_turn_with_images(given, next(iter(given.trajectories)), placeholders, RED)
    train_batch(resumed, read(resumed, given))
    assert resumed.unpublished[-1].data[0].tokens == 6 * 4 + 2
    resumed.publish()
    assert tensors(resumed).keys() == before.keys()


def policy(directory: Path, **more: Any) -> Policy:
    return Policy(directory, TrainerSettings.model_validate({"device": "cpu", **more}))


@pytest.mark.slow
def test_a_frozen_vision_tower_is_not_trained(vision_dir: Path, tmp_path: Path) -> None:
    trained = policy(vision_dir, freeze_vision=True)
    names = [n for n, p in trained.model.named_parameters() if p.requires_grad]
    assert names and not any("vision_tower" in name for name in names)
    assert any("projector" in name for name in names)
    with pytest.raises(SettingsError, match="no vision tower"):
        policy(make_random_model(tmp_path / "text"), freeze_vision=True)


@pytest.mark.slow
def test_an_adapter_is_in_the_language_model_only(vision_dir: Path) -> None:
    trained = policy(vision_dir, lora={"rank": 2})
    names = [n for n, p in trained.model.named_parameters() if p.requires_grad]
    assert names and all("language_model" in name for name in names)


@pytest.mark.slow
def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    text = policy(make_random_model(tmp_path / "text"))
    assert text.images is None and text.readable.images == frozenset()

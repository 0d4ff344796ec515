"""Images in a forward pass, against transformers' own, and what does not fit a prompt."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.sized_vision_models import make_idefics_model, make_qwen_vision_model
from support.vision_model import IMAGE, encoded, make_vision_model

from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.data.minibatches import micro_batches
from clawstream.trainer.data.sequences import Tokens, TrainingSequence
from clawstream.trainer.model.critic import Critic
from clawstream.trainer.model.scores import Scores
from clawstream.trainer.parallel.processes import ONE, Processes
from clawstream.trainer.vision.inputs import ImageInputs, as_the_engine_opens

CPU = torch.device("cpu")
SETTINGS = TrainerSettings(device="cpu")
RESPONSE = (9, 12, 7, 15)


class Family:
    """A model, its processor and the text around one image."""

    def __init__(self, made: tuple[Any, Any], around: str) -> None:
        self.model, self.processor = made
        self.around = around
        self.inputs = ImageInputs(self.processor, self.model.config.model_type)

    def prompt(self, images: Sequence[bytes]) -> Any:
        """Return what transformers makes of a prompt with images."""
        text = "price of " + " then ".join([self.around] * len(images))
        opened = [as_the_engine_opens(image) for image in images]
        return self.processor(text=[text], images=[opened], return_tensors="pt")


@pytest.fixture(scope="module", params=["llava", "qwen2_vl", "idefics3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    if request.param == "llava":
        return Family(make_vision_model(tmp_path_factory.mktemp("llava") / "model"), IMAGE)
    if request.param == "idefics3":
        return Family(make_idefics_model(), IMAGE)
    return Family(make_qwen_vision_model(), "<|vision_start|><|image_pad|><|vision_end|>")


def png(size: tuple[int, int], colour: str) -> bytes:
    return base64.b64decode(encoded(Image.effect_mandelbrot(size, (-2, -1, 1, 1), 50).convert(
        "RGB"
    ).point(lambda value: value // (1 + len(colour)))))  # fmt: skip


RED, BLUE = png((112, 56), "red"), png((56, 84), "blue")


def sequence(prompt: Sequence[int], images: tuple[bytes, ...]) -> TrainingSequence:
    ids = np.array([*prompt, *RESPONSE], np.int32)
    on = np.arange(len(ids)) >= len(prompt)
    tokens = Tokens(
        ids,
        on,
        np.where(on, -3.0, 0.0).astype(np.float32),
        np.full(len(ids), np.nan, np.float32),
        np.full(len(ids), None, object),
        np.where(on, 0, -1).astype(np.int32),
    )
    return TrainingSequence("t", tokens, images=images)


@pytest.mark.slow
def test_log_probabilities_and_gradients_equal_those_of_a_plain_forward(family: Family) -> None:
    inputs = family.prompt([RED, BLUE])
    prompt = inputs.pop("input_ids")
    inputs.pop("attention_mask")
    ids = torch.cat([prompt, torch.tensor([RESPONSE])], dim=1)
    if "mm_token_type_ids" in inputs:
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat([kinds, torch.zeros_like(ids[:, :4])], dim=1)
    logits = family.model(input_ids=ids, **inputs).logits[0, -5:-1]
    plain = logits.log_softmax(-1).gather(-1, torch.tensor(RESPONSE).unsqueeze(-1)).squeeze(-1)
    family.model.zero_grad()
    plain.sum().backward()
    expected = {n: p.grad.clone() for n, p in family.model.named_parameters() if p.grad is not None}

    family.model.zero_grad()
    scores = Scores(family.model, SETTINGS, family.inputs)
    assert not scores.packed
    found = scores.logprobs(collate([sequence(prompt[0].tolist(), (RED, BLUE))], 1.0, CPU))
    found.sum().backward()
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    assert any("vis" in name for name in expected)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in family.model.named_parameters():
        if name in expected:
            torch.testing.assert_close(
                parameter.grad, expected[name], rtol=1e-4, atol=1e-6 * largest
            )
    blue = collate([sequence(prompt[0].tolist(), (RED, RED))], 1.0, CPU)
    if family.model.config.model_type == "llava":  # its images have one size
        assert not torch.allclose(scores.logprobs(blue), plain)


@pytest.mark.slow
def test_images_that_are_not_those_of_the_prompt_are_told(family: Family) -> None:
    ids = np.array([*family.prompt([RED, BLUE])["input_ids"][0].tolist(), 3, 4], np.int32)
    misfit = family.inputs.misfit
    assert misfit((RED, BLUE), ids) is None
    assert "the 1 recorded images have" in str(misfit((RED,), ids))
    assert "holds no image" in str(misfit((), ids))
    assert "refuses an image" in str(misfit((RED, b"no image"), ids))
    assert "refuses an image" in str(misfit((RED, BLUE[:100]), ids))
    if family.model.config.model_type == "qwen2_vl":
        assert "at other places" in str(misfit((BLUE, RED), ids))


def test_a_file_is_opened_upright_and_on_white() -> None:
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 255, 255))
    opened = as_the_engine_opens(base64.b64decode(encoded(clear)))
    assert [opened.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (0, 0, 255)]
    data, turned = BytesIO(), Image.new("RGB", (4, 2), "red")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(data, "JPEG", exif=exif)
    assert as_the_engine_opens(data.getvalue()).size == (2, 4)


@pytest.mark.slow
def test_a_critic_sees_the_images(tmp_path: Path) -> None:
    model, processor = make_vision_model(tmp_path / "model")
    images = ImageInputs(processor, model.config.model_type)
    critic = Critic(tmp_path / "model", SETTINGS, CPU, 0, images=images)
    torch.nn.init.ones_(critic.model.weight)
    prompt = Family((model, processor), IMAGE).prompt([RED])["input_ids"][0].tolist()
    red, blue = critic.score([sequence(prompt, (RED,)), sequence(prompt, (BLUE,))])
    assert red.values is not None and blue.values is not None
    assert not np.allclose(red.values, blue.values)


def test_a_sequence_with_images_has_a_pass_of_its_own() -> None:
    text = [sequence(range(2, n), ()) for n in (5, 6, 7)]
    seen = [sequence(range(2, n), (RED,)) for n in (5, 6)]
    parts = micro_batches([text[0], seen[0], text[1], seen[1], text[2]], 100)
    assert [part for part in parts if part[0].images] == [[one] for one in seen]
    assert sum(map(len, parts)) == 5
    passes = ONE.passes([*seen, *text], 100, packed=False)
    assert [part for part, _ in passes] == [text, [seen[0]], [seen[1]]]
    shares = [[*Processes(rank, 2).passes([*seen, *text], 100, packed=False)] for rank in (0, 1)]
    with_images = [[bool(part[0].images) for part, _ in own] for own in shares]
    assert with_images[0] == with_images[1], "each process gathers the vision tower as often"


@pytest.mark.slow
def test_another_model_must_take_the_same_images(family: Family) -> None:
    family.inputs.check_takes(family.model, "trainer.reference_path")
    other = ImageInputs(family.processor, "another")
    with pytest.raises(SettingsError, match="reference_path: a model of type"):
        other.check_takes(family.model, "trainer.reference_path")


@pytest.mark.slow
def test_a_model_without_a_processor_takes_no_images(family: Family, tmp_path: Path) -> None:
    assert ImageInputs.load(tmp_path, family.model.config) is None
    assert ImageInputs.load(tmp_path, replace_text(family)) is None


def replace_text(family: Family) -> Any:
    return family.model.config.get_text_config()

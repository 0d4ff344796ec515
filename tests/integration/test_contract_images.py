"""The contract for images: official clients, the gateway, and a real vLLM.

The vision model is tiny and has random weights. vLLM's own LLaVA needs torchvision, which its CPU
build does not have. The same model on vLLM's Transformers backend does not need it.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.contract import CLOSE, VERSION, Contract, checked, ids_of, logprobs_of, standing
from support.speakers import SPEAKERS
from support.vision_model import IMAGE, IMAGE_TOKENS, encoded, image_of, make_vision_model

from clawstream.runtime.blob_store import BlobStore
from clawstream.schemas.blob_refs import images_of
from clawstream.schemas.records import Step, VersionSpan
from clawstream.schemas.settings import TrainerSettings
from clawstream.schemas.tokens import unpack_ids
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.data.sequences import Tokens, TrainingSequence
from clawstream.trainer.model.policy import Policy

NAMES = ("openai.chat", "openai.responses", "anthropic.messages")


class Vision(NamedTuple):
    """The engine, and the processor that makes model input from an image.

    Attributes:
        work: has the model, and the blobs of the gateways.
    """

    contract: Contract
    processor: Any
    work: Path

    def images(self, step: Step) -> tuple[bytes, ...]:
        """Return the images of a step as a trainer reads them."""
        store = BlobStore(str(self.work / "captured" / "blobs"))
        return tuple(map(store.get, images_of(step)))

    def pixels(self, colour: str) -> Any:
        return self.processor.image_processor(image_of(colour), return_tensors="pt")["pixel_values"]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    work = tmp_path_factory.mktemp("vision")
    network, processor = make_vision_model(work / "model")
    with standing(
        work, work / "model", processor.tokenizer, network, "--model-impl", "transformers"
    ) as contract:
        yield Vision(contract, processor, work)


def conversation(name: str, colour: str) -> list[dict[str, Any]]:
    """Return a question with an image, in the protocol's own form."""
    data, text = encoded(image_of(colour)), "price of k1"
    url = f"data:image/png;base64,{data}"
    content: list[dict[str, Any]]
    match name:
        case "openai.chat":
            content = [
                {"type": "text", "text": text},
                {"type": "image_url", "image_url": {"url": url}},
            ]
        case "openai.responses":
            content = [
                {"type": "input_text", "text": text},
                {"type": "input_image", "detail": "auto", "image_url": url},
            ]
        case _:
            source = {"type": "base64", "media_type": "image/png", "data": data}
            content = [{"type": "text", "text": text}, {"type": "image", "source": source}]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_an_image_is_recorded_with_its_tokens_and_the_image(
    vision: Vision, name: str, stream: bool
) -> None:
    contract, speaker = vision.contract, SPEAKERS[name]
    replies = {}
    for colour in ("red", "blue"):
        said = conversation(name, colour)
        (seen,), (step,) = contract.ask(speaker, said, False, stream, temperature=0, max_tokens=12)
        checked(contract, speaker, step, seen, stream, pixel_values=vision.pixels(colour))
        assert encoded(image_of(colour)).encode() in step.request_json
        assert vision.images(step) == (b64decode(encoded(image_of(colour))),)
        assert step.prompt_token_ids is not None
        # The prompt has the same placeholder for every image; the image itself is in the request.
        place = vision.processor.tokenizer.convert_tokens_to_ids(IMAGE)
        assert unpack_ids(step.prompt_token_ids).count(place) == IMAGE_TOKENS
        replies[colour] = (step.prompt_token_ids, step.response_token_ids)
    assert replies["red"][0] == replies["blue"][0]
    assert replies["red"][1] != replies["blue"][1], "the model does not look at the image"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_stock_vllm_tells_the_tokens_of_a_chat_with_an_image(
    vision: Vision, stream: bool
) -> None:
    contract, speaker = vision.contract, SPEAKERS["openai.chat"]
    said = conversation(speaker.name, "red")
    (seen,), (step,) = contract.ask(
        speaker, said, False, stream, contract.vllm, temperature=0, max_tokens=12
    )
    assert step.versions == ()
    spans = (VersionSpan(version=VERSION, start=0, end=len(ids_of(step))),)
    checked(
        contract,
        speaker,
        replace(step, versions=spans),
        seen,
        stream,
        pixel_values=vision.pixels("red"),
    )


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_scores_a_reply_to_an_image_as_the_engine_did(
    vision: Vision, name: str
) -> None:
    said, more = conversation(name, "blue"), {"temperature": 0, "max_tokens": 12}
    _, (step,) = vision.contract.ask(SPEAKERS[name], said, False, False, **more)
    assert step.prompt_token_ids is not None
    prompt, sampled, images = unpack_ids(step.prompt_token_ids), ids_of(step), vision.images(step)
    policy = Policy(vision.work / "model", TrainerSettings(device="cpu"))
    ids = np.array([*prompt, *sampled], np.int32)
    assert policy.images is not None and policy.images.misfit(images, ids) is None
    on = np.arange(len(ids)) >= len(prompt)
    tokens = Tokens(
        ids,
        on,
        np.array([0.0] * len(prompt) + logprobs_of(step), np.float32),
        np.full(len(ids), np.nan, np.float32),
        np.full(len(ids), VERSION, object),
        np.where(on, 0, -1).astype(np.int32),
    )
    batch = collate([TrainingSequence("t", tokens, images=images)], 1.0, policy.device)
    difference = (policy.logprobs(batch) - batch.logprobs).abs().max().item()
    print(f"largest difference of log-probabilities, engine and trainer: {difference:.1e}")
    assert difference < CLOSE

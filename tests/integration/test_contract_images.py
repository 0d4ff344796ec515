"""The contract for images: official clients, the gateway, and a real vLLM.

The vision model is tiny and has random weights. vLLM's own LLaVA needs torchvision, which its CPU
build does not have. The same model on vLLM's Transformers backend does not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from support.contract import VERSION, Contract, checked, ids_of, standing
from support.speakers import SPEAKERS
from support.vision_model import IMAGE, IMAGE_TOKENS, encoded, image_of, make_vision_model

from schemas.records import VersionSpan
from schemas.tokens import unpack_ids

NAMES = ("openai.chat", "openai.responses", "anthropic.messages")
pytestmark = pytest.mark.timeout(900)


class Vision(NamedTuple):
    """The engine, and the processor that makes model input from an image."""

    contract: Contract
    processor: Any

    def pixels(self, colour: str) -> Any:
        return self.processor.image_processor(image_of(colour), return_tensors="pt")["pixel_values"]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    work = tmp_path_factory.mktemp("vision")
    network, processor = make_vision_model(work / "model")
    with standing(
        work, work / "model", processor.tokenizer, network, "--model-impl", "transformers"
    ) as contract:
        yield Vision(contract, processor)


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

"""The inputs that a vision-language model computes from recorded images."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoProcessor, PreTrainedConfig, PreTrainedModel

from clawstream.runtime.logs import logger
from clawstream.schemas.errors import SettingsError

_OF_TEXT = ("input_ids", "attention_mask")
_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
"""Inputs with a value for each token of a sequence, which tell images from text."""


def has_vision(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is that of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def freeze_vision(model: PreTrainedModel) -> None:
    """Exclude the vision tower from training.

    Raises:
        SettingsError: the model has none.
    """
    tower = model.get_encoder("image")
    if not has_vision(model.config) or tower is model or tower is model.base_model:
        raise SettingsError(
            "setting trainer.freeze_vision: the model has no vision tower that transformers knows "
            "by its name; leave it at false"
        )
    tower.requires_grad_(False)


class ImageInputs:
    """The processor of a vision-language model: images to tensors and numbers of tokens.

    Thread-safe: the images of the next batch are checked while one trains.

    Attributes:
        placeholder: id of the token that stands for a part of an image.
        model_type: of the model that takes these inputs.
    """

    def __init__(self, processor: Any, model_type: str) -> None:
        self.placeholder, self.model_type = int(processor.image_token_id), model_type
        self._processor, self._token = processor, str(processor.image_token)
        self._lock = threading.Lock()

    @classmethod
    def load(cls, directory: Path, config: PreTrainedConfig) -> ImageInputs | None:
        """Return the processor of a model directory.

        Returns:
            None for a text model, and without a processor that transformers can load here. Then
            images are left out of training.
        """
        if not has_vision(config):
            return None
        try:
            processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
            return cls(processor, config.model_type)
        except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
            logger().warning(
                "images_off",
                directory=str(directory),
                error=str(error),
                action="images are left out of training; the processor needs its files beside the "
                "weights, and torchvision for many models",
            )
            return None

    def misfit(self, images: Sequence[bytes], ids: NDArray[np.int32]) -> str | None:
        """Return why images are not those of a prompt; None if they can be.

        Args:
            images: files, in the order of the prompt.
            ids: token ids that the engine reported.
        """
        if not images:
            return "the request holds no image: one that it names by a URL is not recorded"
        try:
            found = self._processed(images)["input_ids"][0].numpy()
        except (OSError, ValueError, RuntimeError) as error:
            return f"the processor refuses an image: {error}"
        own, seen = found == self.placeholder, ids == self.placeholder
        if own.sum() == seen.sum() and np.isin(_ends(seen), _ends(own)).all():
            return None
        return (
            f"the {len(images)} recorded images have {own.sum()} placeholder tokens, the prompt "
            f"has {seen.sum()}, or at other places; the engine must process images as the "
            "processor beside the model's weights"
        )

    def tensors(self, images: Sequence[bytes], token_ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of a forward pass besides the token ids.

        Args:
            images: files that fit the tokens.
            token_ids: shape (1, tokens).
        """
        found = self._processed(images)
        tensors = {
            name: value.to(token_ids.device)
            for name, value in found.items()
            if name not in (*_OF_TEXT, *_OF_TOKENS) and isinstance(value, Tensor)
        }
        for name in _OF_TOKENS:
            if name in found:
                kinds = self._processor.create_mm_token_type_ids(token_ids.tolist())
                tensors[name] = torch.tensor(kinds, device=token_ids.device)
        return tensors

    def _processed(self, images: Sequence[bytes]) -> Any:
        """Return what the processor makes of one text that is these images, on separate lines."""
        text = "\n".join([self._token] * len(images))
        opened = [as_the_engine_opens(image) for image in images]
        with self._lock:
            return self._processor(text=[text], images=[opened], return_tensors="pt")

    def check_takes(self, model: PreTrainedModel, setting: str) -> None:
        """Raise SettingsError unless another model takes the same inputs.

        Args:
            model: scores the sequences of the policy.
            setting: that names it, for the error.
        """
        own = model.config.model_type
        if own != self.model_type:
            raise SettingsError(
                f"setting {setting}: a model of type {own}, and the policy's is {self.model_type}: "
                "it can't see the images of the policy's sequences; give one of the same type"
            )


def as_the_engine_opens(image: bytes) -> Any:
    """Return an image file as vLLM opens it: upright, and in RGB on a white ground.

    Raises:
        OSError: it is no image.
    """
    from PIL import Image, ImageOps

    try:
        opened = ImageOps.exif_transpose(Image.open(io.BytesIO(image)))
        opened.load()
    except (SyntaxError, Image.DecompressionBombError) as error:
        raise OSError(str(error)) from error
    if not opened.has_transparency_data:
        return opened.convert("RGB")
    opened = opened.convert("RGBA")
    ground = Image.new("RGB", opened.size, "white")
    ground.paste(opened, mask=opened.getchannel("A"))
    return ground


def _ends(placeholders: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of placeholders up to the end of each run of them."""
    follows = np.append(placeholders[1:], False)
    found: NDArray[np.int64] = np.cumsum(placeholders, dtype=np.int64)[placeholders & ~follows]
    return found

"""The trained model and its optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from clawstream.runtime.digests import digest_of_model
from clawstream.trainer.data.micro_batch import MicroBatch
from clawstream.trainer.data.sequences import ReadableIds
from clawstream.trainer.model.files import (
    TensorDtypes,
    auxiliary_files,
    empty_masters,
    load_masters,
    media_placeholders,
    save_configuration,
    save_rounded,
)
from clawstream.trainer.model.lora import save_adapter, save_identity, with_adapter
from clawstream.trainer.model.scores import Scores
from clawstream.trainer.model.state import ModelState, OptimizerState, RandomState
from clawstream.trainer.model.tokenizer import tokenizer_fingerprint
from clawstream.trainer.parallel.processes import ONE, Processes
from clawstream.trainer.parallel.sharding import checkpoint_activations, compile_layers, shard
from clawstream.trainer.vision.inputs import ImageInputs, freeze_vision

if TYPE_CHECKING:
    from clawstream.schemas.settings import TrainerSettings


class Policy:
    """Model and AdamW on one device.

    Weights, optimiser state and gradients are float32 for any `trainer.dtype`. At a learning rate
    of 1e-6 an update is smaller than half the distance between two bfloat16 numbers, so rounding
    would remove it.

    With `trainer.lora` the weights of the model are frozen, and those of an adapter are trained and
    saved.

    Attributes:
        base_model: digest of the frozen model's files; None without an adapter.
        state: the parts that a checkpoint stores: weights, optimiser, random states.
        tokenizer_fingerprint: of the tokenizer beside the weights; None if there is none.
        images: inputs for images; None if it takes none.
    """

    def __init__(
        self,
        directory: Path,
        settings: TrainerSettings,
        *,
        weights: bool = True,
        processes: Processes = ONE,
    ) -> None:
        """Load the weights of a Hugging Face directory, with a new optimiser.

        Args:
            directory: configuration, tokenizer, and weights; of the base of an adapter.
            settings: of the trainer.
            weights: False leaves the weights uninitialized, for a checkpoint that is loaded next.
            processes: that share the model.

        Raises:
            SettingsError: the weights cannot be read.
        """
        self.settings, self.processes = settings, processes
        cuda = settings.device == "cuda" or (
            settings.device == "auto" and torch.cuda.is_available()
        )
        self.device = torch.device("cuda" if cuda else "cpu")
        model, self._own_dtypes = (load_masters if weights else empty_masters)(directory)
        # `shard` moves one layer at a time, so no device holds the whole model.
        self.model = model.to(self.device) if processes.size == 1 else model
        self._auxiliary = auxiliary_files(directory)
        self.tokenizer_fingerprint = tokenizer_fingerprint(directory)
        self.images = ImageInputs.load(directory, self.model.config)
        # Gradients flow, but dropout is off: the trained model must equal the sampled model.
        self.model.eval()
        torch.manual_seed(settings.seed)
        self._adapter, self.base_model = None, None
        if settings.freeze_vision:
            freeze_vision(self.model)
        if settings.lora.rank is not None:
            self._adapter = with_adapter(self.model, settings.lora, directory)
            self.base_model = digest_of_model(directory)
        if settings.activation_checkpointing:
            checkpoint_activations(self.model)
        self.scores = Scores(self.model, settings, self.images)
        if settings.compile and cuda:
            compile_layers(self.model)
        shard(self.scores, processes, self.device)
        self.optimizer = torch.optim.AdamW(
            self.trained,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        self.state: Mapping[str, Stateful] = {
            "model": ModelState(self.model, trained_only=self._adapter is not None),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "random": RandomState(self.device),
        }

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimiser changes."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def readable(self) -> ReadableIds:
        """The ids with an embedding, and those of them that stand for images, videos and sounds."""
        embeddings = self.model.get_input_embeddings().num_embeddings
        images = frozenset[int]() if self.images is None else {self.images.placeholder}
        media = media_placeholders(self.model.config)
        return ReadableIds(int(embeddings), media - images, images)

    def save(self, directory: Path, dtypes: TensorDtypes) -> None:
        """Write a Hugging Face directory: safetensors, configuration and tokenizer files.

        Of an adapter, write peft's two files. Every process must call it; the leader writes.

        The tokenizer files are those of the directory that the model was loaded from.

        Args:
            directory: the target; it is created if necessary.
            dtypes: the dtypes to round to.
        """
        writes = self.processes.leads
        if self._adapter is not None and self.base_model is not None:
            save_adapter(self._adapter, directory, dtypes.main, self.base_model, writes=writes)
            return
        save_rounded(self.model, directory, dtypes, writes=writes)
        if not writes:
            return
        for name, content in self._auxiliary.items():
            if not (directory / name).exists():
                (directory / name).write_bytes(content)

    def save_configuration(self, directory: Path) -> None:
        """Write what a policy without weights is made from: configuration, tokenizer, dtypes."""
        save_configuration(directory, self._auxiliary, self._own_dtypes, self.model.config)
        if self.base_model is not None:
            save_identity(directory, self.settings.lora, self.base_model)

    def served_dtypes(self, engine_dtype: str) -> TensorDtypes:
        """Return the dtypes of published versions.

        Args:
            engine_dtype: `rollout.dtype`; `auto` means the dtype of the model itself.
        """
        own = self._own_dtypes
        return (
            own
            if engine_dtype == "auto"
            else TensorDtypes(getattr(torch, engine_dtype), own.others)
        )

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of every trained token, in sequence order.

        Each value belongs to the distribution at the temperature of its step, as the engine's does:
        log softmax(logits / temperature).

        Returns:
            Shape (tokens,), float32, with gradient.
        """
        return self.scores.logprobs(batch)

    def logprobs_and_entropy(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-probability of every trained token and the entropy it was drawn at.

        Returns:
            Both of shape (tokens,), float32, with gradient; the entropy in nats.
        """
        return self.scores.logprobs_and_entropy(batch)

    def clear_gradients(self, *, zeros: bool) -> None:
        """Clear the gradients.

        zeros: set them to zero instead of None, so that AdamW takes a step without a new gradient.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if zeros:
            for parameter in self.trained:
                parameter.grad = torch.zeros_like(parameter)

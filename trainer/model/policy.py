"""The trained model and its optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schemas.settings import TrainerSettings
from trainer.data.micro_batch import MicroBatch
from trainer.model.files import (
    TensorDtypes,
    auxiliary_files,
    load_masters,
    save_masters,
    save_rounded,
)
from trainer.model.scores import Scores


class Policy:
    """Model and AdamW on one device.

    The whole state is `save` (the weights) plus `training_state` (optimiser, random states).

    Weights, optimiser state and gradients are float32 for any `trainer.dtype`. At a learning rate
    of 1e-6 an update is smaller than half the distance between two bfloat16 numbers, so rounding
    would remove it.
    """

    def __init__(self, directory: Path, settings: TrainerSettings) -> None:
        """Load the weights of a Hugging Face directory, with a new optimiser.

        Raises:
            SettingsError: the weights cannot be read.
        """
        self.settings = settings
        cuda = settings.device == "cuda" or (
            settings.device == "auto" and torch.cuda.is_available()
        )
        self.device = torch.device("cuda" if cuda else "cpu")
        model, self._own_dtypes = load_masters(directory)
        self.model = model.to(self.device)
        self._auxiliary = auxiliary_files(directory)
        # Gradients flow, but dropout is off: the trained model must equal the sampled model.
        self.model.eval()
        self.scores = Scores(self.model, settings)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        torch.manual_seed(settings.seed)

    @property
    def vocabulary(self) -> int:
        """Number of token ids with an embedding: 0 to vocabulary - 1."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def save(self, directory: Path, dtypes: TensorDtypes | None = None) -> None:
        """Write a Hugging Face directory: safetensors, configuration and tokenizer files.

        The tokenizer files are those of the directory that the model was loaded from.

        Args:
            directory: the target; it is created if necessary.
            dtypes: the dtypes to round to; None keeps the float32 master weights for a checkpoint.
        """
        if dtypes is None:
            save_masters(self.model, directory)
        else:
            save_rounded(self.model, directory, dtypes)
        for name, content in self._auxiliary.items():
            if not (directory / name).exists():
                (directory / name).write_bytes(content)

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

    def training_state(self) -> dict[str, Any]:
        """Return the state that a resume needs besides the weights, for `torch.save`."""
        cuda = torch.cuda.get_rng_state_all() if self.device.type == "cuda" else []
        return {
            "optimizer": self.optimizer.state_dict(),
            "rng_cpu": torch.get_rng_state(),
            "rng_cuda": cuda,
            "dtype": self._own_dtypes.main,
            "other_dtypes": dict(self._own_dtypes.others),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of `training_state` exactly."""
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng_cpu"])
        if state["rng_cuda"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["rng_cuda"])
        # The checkpoint's files are float32.
        self._own_dtypes = TensorDtypes(state["dtype"], state["other_dtypes"])

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
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

"""Forward passes of a model: what it computes for trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from clawstream.trainer.data.micro_batch import MicroBatch, collate
from clawstream.trainer.data.sequences import TrainingSequence
from clawstream.trainer.model.chunked_scores import chunked_scores
from clawstream.trainer.model.packed_attention import structure_of, use_packing
from clawstream.trainer.parallel.processes import ONE, Processes
from clawstream.trainer.vision.inputs import ImageInputs

if TYPE_CHECKING:
    from clawstream.schemas.settings import TrainerSettings


def hidden_states(
    decoder: PreTrainedModel,
    batch: MicroBatch,
    settings: TrainerSettings,
    images: ImageInputs | None = None,
) -> Tensor:
    """Return the last hidden state before every trained token.

    Args:
        decoder: a transformer without its head.
        batch: the tokens.
        settings: the dtype of the pass.
        images: makes the model's inputs of the images of a batch that has some.

    Returns:
        Shape (tokens, width), with gradient.
    """
    with _autocast(batch, settings):
        output = decoder(**_inputs(batch, images))
    states: Tensor = output.last_hidden_state.flatten(0, 1)[batch.before]
    return states


def _inputs(batch: MicroBatch, images: ImageInputs | None) -> dict[str, Any]:
    """Return the arguments of a forward pass.

    There is no attention mask for padded rows: padding is on the right, where a causal model never
    looks, and flash kernels accept no mask. Positions among images follow the model's own rule.
    """
    found: dict[str, Any] = {"input_ids": batch.token_ids, "use_cache": False}
    if batch.row is not None:
        device = batch.token_ids.device
        found["position_ids"] = torch.from_numpy(batch.row.positions).to(device).unsqueeze(0)
        found["structure"] = structure_of(batch.row, device)
    if batch.images:
        assert images is not None, "a sequence with images for a model without them"
        found |= images.tensors(batch.images, batch.token_ids)
    return found


class Scores(nn.Module):
    """Log-probability and entropy of trained tokens under one causal language model.

    Where the head is a plain matrix, its logits are computed for the trained tokens only, and in
    chunks. For other heads (a bias, a scale, a soft cap, an adapter, a hook) all logits of a pass
    exist at once.

    It is a module because FSDP gathers the weights of a module when it is called.

    Attributes:
        packed: the model takes packed rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSettings,
        images: ImageInputs | None = None,
    ) -> None:
        """images: of a vision-language model."""
        super().__init__()
        self._model, self._settings, self._images = model, settings, images
        self.packed = use_packing(model, settings)

    @cached_property
    def _plain_head(self) -> bool:
        """Looked at in the first pass: before it, a checkpoint may not be loaded yet."""
        return head_is_plain(self._model)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of every trained token, shape (tokens,), with gradient."""
        logprobs: Tensor = self(batch, with_entropy=False)[0]
        return logprobs

    def logprobs_and_entropy(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-probability of every trained token and the entropy of its distribution.

        Returns:
            Both of shape (tokens,), float32, with gradient; the entropy in nats.
        """
        found: tuple[Tensor, Tensor] = self(batch, with_entropy=True)
        return found

    def forward(self, batch: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Compute one pass."""
        if self._plain_head:
            return chunked_scores(
                hidden_states(self._model.base_model, batch, self._settings, self._images),
                self._model.get_output_embeddings().weight,
                batch.targets,
                batch.temperatures,
                getattr(torch, self._settings.dtype),
                with_entropy=with_entropy,
            )
        with _autocast(batch, self._settings):
            logits = self._model(**_inputs(batch, self._images)).logits
        scores = logits.flatten(0, 1)[batch.before].float() / batch.temperatures.unsqueeze(-1)
        normalizers = scores.logsumexp(-1)
        logprobs = scores.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1) - normalizers
        # A logit of minus infinity adds nothing, but 0 * -inf is NaN.
        finite = scores.masked_fill(torch.isneginf(scores), 0.0)
        return logprobs, normalizers - (scores.softmax(-1) * finite).sum(-1)


@torch.no_grad()
def head_is_plain(model: PreTrainedModel) -> bool:
    """Return whether the logits are the last hidden state times the matrix of the head."""
    head = model.get_output_embeddings()
    # A bias or an adapter may be zero before it is trained.
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return False
    ids = torch.arange(1, 4, device=head.weight.device).unsqueeze(0)
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    product: Tensor = states @ head.weight.T
    error: Tensor = model(input_ids=ids, use_cache=False).logits - product
    return bool(error.norm() < 1e-5 * product.norm())


def _autocast(batch: MicroBatch, settings: TrainerSettings) -> torch.autocast:
    return torch.autocast(
        batch.token_ids.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"
    )


@torch.no_grad()
def logprobs_of(
    sequences: Sequence[TrainingSequence],
    logprobs: Callable[[MicroBatch], Tensor],
    settings: TrainerSettings,
    device: torch.device,
    processes: Processes = ONE,
    *,
    packed: bool = False,
) -> list[NDArray[np.float32]]:
    """Return the log-probabilities of each sequence's trained tokens, without gradient.

    A token of probability zero gets the sampled log-probability: minus infinity would make the loss
    of the whole minibatch infinite.

    Args:
        sequences: of a batch.
        logprobs: of a model; one forward pass.
        settings: the size of a pass and the temperature of steps that record none.
        device: of the model.
        processes: that share the work; each returns all values.
        packed: the model takes packed rows.
    """
    order = {id(sequence): i for i, sequence in enumerate(sequences)}
    own: dict[int, NDArray[np.float32]] = {}
    for part, counts in processes.passes(sequences, settings.micro_batch_tokens, packed=packed):
        batch = collate(part, settings.temperature, device, packed=packed)
        values = logprobs(batch)
        if not counts:
            continue
        values = torch.where(torch.isneginf(values), batch.logprobs, values).cpu()
        ends = np.cumsum([sequence.trained_tokens for sequence in part])
        for sequence, share in zip(part, np.split(values.numpy(), ends[:-1]), strict=True):
            own[order[id(sequence)]] = share
    found = {at: values for shares in processes.gather(own) for at, values in shares.items()}
    return [found[at] for at in range(len(sequences))]

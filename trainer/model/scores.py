"""What a model computes for trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from schemas.settings import TrainerSettings
from trainer.data.micro_batch import MicroBatch, collate
from trainer.data.minibatches import micro_batches
from trainer.data.sequences import TrainingSequence


def token_scores(model: PreTrainedModel, batch: MicroBatch, settings: TrainerSettings) -> Tensor:
    """Return logits / temperature before every trained token.

    Returns:
        Shape (tokens, vocabulary), float32, with gradient.
    """
    # No attention mask: padding is on the right, where a causal model never looks, and flash
    # kernels accept no mask.
    with torch.autocast(
        batch.token_ids.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"
    ):
        logits = model(input_ids=batch.token_ids, use_cache=False).logits[:, :-1]
    scores: Tensor = logits[batch.mask[:, 1:]].float() / batch.temperatures.unsqueeze(-1)
    return scores


def chosen(scores: Tensor, batch: MicroBatch) -> Tensor:
    """Return the score of each trained token itself: (tokens, vocabulary) to (tokens,)."""
    trained = batch.token_ids[:, 1:][batch.mask[:, 1:]]
    return scores.gather(-1, trained.unsqueeze(-1)).squeeze(-1)


def token_logprobs(model: PreTrainedModel, batch: MicroBatch, settings: TrainerSettings) -> Tensor:
    """Return the log-probability of every trained token, shape (tokens,), with gradient."""
    scores = token_scores(model, batch, settings)
    return chosen(scores, batch) - scores.logsumexp(-1)


@torch.no_grad()
def logprobs_of(
    sequences: Sequence[TrainingSequence],
    logprobs: Callable[[MicroBatch], Tensor],
    settings: TrainerSettings,
    device: torch.device,
) -> list[NDArray[np.float32]]:
    """Return the log-probabilities of each sequence's trained tokens, without gradient.

    A token of probability zero gets the sampled log-probability: minus infinity would make the loss
    of the whole minibatch infinite.

    Args:
        sequences: of a batch.
        logprobs: of a model; one forward pass.
        settings: the size of a pass and the temperature of steps that record none.
        device: of the model.
    """
    order = {id(sequence): i for i, sequence in enumerate(sequences)}
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(sequences)
    for part in micro_batches(sequences, settings.micro_batch_tokens):
        batch = collate(part, settings.temperature, device)
        values = logprobs(batch)
        values = torch.where(torch.isneginf(values), batch.logprobs, values).cpu()
        ends = np.cumsum([sequence.trained_tokens for sequence in part])
        for sequence, share in zip(part, np.split(values.numpy(), ends[:-1]), strict=True):
            found[order[id(sequence)]] = share
    return found

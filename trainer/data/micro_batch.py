"""The tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.sequences import TrainingSequence, concatenated

PADDING = 0  # any id: it is on the right, so no token attends to it, and it is never trained


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Several sequences, padded on the right.

    `token_ids` and `mask` have shape (sequences, longest); the others (tokens,), with one value for
    each trained token in sequence order.

    Attributes:
        mask: whether the token is trained.
        logprobs: float32, at sampling time.
        temperatures: float32, of the distributions to compare.
        versions: id of the weight version that sampled the token, or None.
    """

    token_ids: Tensor
    mask: Tensor
    logprobs: Tensor
    temperatures: Tensor
    advantages: Tensor
    versions: NDArray[np.object_]


def collate(
    sequences: Sequence[TrainingSequence], temperature: float, device: torch.device
) -> MicroBatch:
    """Return the tensors of a forward pass.

    Args:
        sequences: at least one.
        temperature: for steps that record none.
        device: of the tensors.
    """
    shape = (len(sequences), max(len(sequence.tokens.ids) for sequence in sequences))
    token_ids, mask = np.full(shape, PADDING, np.int64), np.zeros(shape, bool)
    for i, sequence in enumerate(sequences):
        token_ids[i, : len(sequence.tokens.ids)] = sequence.tokens.ids
        mask[i, : len(sequence.tokens.ids)] = sequence.tokens.mask
    parts = [sequence.tokens.trained() for sequence in sequences]
    trained = concatenated(parts)
    trained.temperatures[np.isnan(trained.temperatures)] = temperature
    advantages = np.repeat(
        np.array([sequence.advantage for sequence in sequences], np.float32),
        [len(tokens.ids) for tokens in parts],
    )
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        mask=torch.from_numpy(mask).to(device),
        logprobs=torch.from_numpy(trained.logprobs).to(device),
        temperatures=torch.from_numpy(trained.temperatures).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        versions=trained.versions,
    )

"""The tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clawstream.trainer.data.packing import PackedRow, pack
from clawstream.trainer.data.sequences import Tokens, TrainingSequence, concatenated

PADDING = 0  # any id: it is on the right, so no token attends to it, and it is never trained


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Several sequences, in one packed row or in rows that are padded on the right.

    `token_ids` has shape (1, packed tokens) or (sequences, longest); the other tensors (tokens,),
    with one value for each trained token in sequence order.

    Attributes:
        row: the structure of the packed row; None for padded rows.
        before: int64, place of the token before the trained one in the flattened `token_ids`: its
            hidden state gives the distribution.
        targets: int64, id of the trained token.
        logprobs: float32, at sampling time.
        temperatures: float32, of the distributions to compare.
        old_logprobs: float32, of the policy before the batch; the sampled ones if not recomputed.
        advantages: float32.
        sequence: int64, index of the token's sequence in the pass.
        step: int64, index of the token's step in its trajectory.
        lengths: int64, shape (sequences,), trained tokens of each.
        ref_logprobs, teacher_logprobs: float32, of those models; None without them.
        values, returns: float32, of a critic and its target; None without a critic.
        versions: id of the weight version that sampled the token, or None.
        computed_tokens: tokens of the pass, without padding.
        attended_pairs: pairs of query and key in the attention of a layer.
        images: files of the images of the pass's only sequence; without images there may be more.
    """

    row: PackedRow | None
    token_ids: Tensor
    before: Tensor
    targets: Tensor
    logprobs: Tensor
    temperatures: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    step: Tensor
    lengths: Tensor
    ref_logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    versions: NDArray[np.object_]
    computed_tokens: int
    attended_pairs: float
    images: tuple[bytes, ...] = ()


def collate(
    sequences: Sequence[TrainingSequence],
    temperature: float,
    device: torch.device,
    *,
    packed: bool = False,
) -> MicroBatch:
    """Return the tensors of a forward pass.

    Args:
        sequences: at least one; one with images is alone.
        temperature: for steps that record none.
        device: of the tensors.
        packed: in one row, each shared prefix once.
    """
    sizes = [len(sequence.tokens.ids) for sequence in sequences]
    row = pack([sequence.tokens.ids for sequence in sequences]) if packed else None
    if row is not None:
        token_ids, places = row.ids.astype(np.int64)[np.newaxis], row.places
    else:
        token_ids, places = _padded(sequences)
    before = [
        where[np.flatnonzero(sequence.tokens.mask) - 1]
        for sequence, where in zip(sequences, places, strict=True)
    ]
    trained = concatenated(sequence.tokens.trained() for sequence in sequences)
    trained.temperatures[np.isnan(trained.temperatures)] = temperature
    columns = {
        "token_ids": token_ids,
        "before": np.concatenate(before),
        **_columns(sequences, trained),
    }
    tensors = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
    return MicroBatch(
        row=row,
        **tensors,
        ref_logprobs=_optional([sequence.ref_logprobs for sequence in sequences], device),
        teacher_logprobs=_optional([sequence.teacher_logprobs for sequence in sequences], device),
        values=_optional([sequence.values for sequence in sequences], device),
        returns=_optional([sequence.returns for sequence in sequences], device),
        versions=trained.versions,
        computed_tokens=sum(sizes) if row is None else len(row.ids),
        attended_pairs=sum(n * n / 2 for n in sizes) if row is None else row.pairs,
        images=sequences[0].images,
    )


def _columns(sequences: Sequence[TrainingSequence], trained: Tokens) -> dict[str, NDArray[Any]]:
    """Return the columns that every pass has, with a value for each trained token.

    Args:
        sequences: of the pass.
        trained: their trained tokens, in order.
    """
    lengths = np.array([sequence.trained_tokens for sequence in sequences], np.int64)
    old = [
        sequence.tokens.logprobs[sequence.tokens.mask]
        if sequence.old_logprobs is None
        else sequence.old_logprobs
        for sequence in sequences
    ]
    advantages = [
        np.zeros(sequence.trained_tokens, np.float32)
        if sequence.advantages is None
        else sequence.advantages
        for sequence in sequences
    ]
    return {
        "targets": trained.ids.astype(np.int64),
        "logprobs": trained.logprobs,
        "temperatures": trained.temperatures,
        "old_logprobs": np.concatenate(old),
        "advantages": np.concatenate(advantages),
        "sequence": np.repeat(np.arange(len(sequences)), lengths),
        "step": trained.steps.astype(np.int64),
        "lengths": lengths,
    }


def _padded(
    sequences: Sequence[TrainingSequence],
) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], ...]]:
    """Return padded rows, and the places of each sequence in the flattened rows."""
    longest = max(len(sequence.tokens.ids) for sequence in sequences)
    token_ids = np.full((len(sequences), longest), PADDING, np.int64)
    for i, sequence in enumerate(sequences):
        token_ids[i, : len(sequence.tokens.ids)] = sequence.tokens.ids
    places = np.arange(token_ids.size).reshape(token_ids.shape)
    return token_ids, tuple(places)


def _optional(parts: Sequence[NDArray[np.float32] | None], device: torch.device) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(known)).to(device) if len(known) == len(parts) else None

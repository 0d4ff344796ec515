"""The loss of a minibatch: policy loss, divergence, entropy, and their mean."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.schemas.errors import SettingsError
from clawstream.trainer.algorithms.batch import LossBatch, LossFunction
from clawstream.trainer.algorithms.kl import kl
from clawstream.trainer.algorithms.registry import setting_of


class MinibatchSize(NamedTuple):
    """Trained tokens and sequences of a minibatch: its passes divide by the same numbers."""

    tokens: int
    sequences: int


def objective(
    batch: LossBatch,
    loss: LossFunction,
    settings: AlgorithmSettings,
    size: MinibatchSize,
    metrics: dict[str, Tensor] | None = None,
) -> Tensor:
    """Return the share of one forward pass in the loss of its minibatch, a scalar.

    The shares of all passes add up to
    aggregate(policy loss + kl_coef * divergence - entropy_coef * entropy).

    Args:
        batch: tokens of the pass.
        loss: of the algorithm.
        settings: of the algorithm.
        size: of the whole minibatch.
        metrics: gets those of the loss.

    Raises:
        SettingsError: the loss, or one of its metrics, does not have one value for each token.
        ValueError: a coefficient is set for a column that the batch does not have.
    """
    found = loss(batch, settings)
    losses, own = found if isinstance(found, tuple) else (found, {})
    for name, values in {"loss": losses, **own}.items():
        if values.shape != batch.logprobs.shape:
            raise SettingsError(
                f"setting {setting_of('loss')}: its {name} has shape "
                f"{tuple(values.shape)} for {len(batch.logprobs)} tokens; one value for each token "
                "is needed"
            )
    if metrics is not None:
        metrics |= {name: values.detach() for name, values in own.items()}
    if settings.kl_coef and settings.kl_in == "loss":
        if batch.ref_logprobs is None:
            raise ValueError("kl_coef is set, but the batch has no ref_logprobs")
        divergence = kl(batch.logprobs, batch.ref_logprobs, settings.kl_estimator)
        losses = losses + settings.kl_coef * divergence
    if settings.entropy_coef:
        if batch.entropy is None:
            raise ValueError("entropy_coef is set, but the batch has no entropy")
        losses = losses - settings.entropy_coef * batch.entropy
    return aggregate(losses, batch, settings, size)


def aggregate(
    losses: Tensor, batch: LossBatch, settings: AlgorithmSettings, size: MinibatchSize
) -> Tensor:
    """Return the mean of token losses in the way of `settings.aggregation`, a scalar.

    token_mean: over all tokens (DAPO, arXiv 2503.14476, eq. 8). sequence_mean: over the sequences
    of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3). fixed_length: the sum of a
    sequence divided by a constant, as a mean over the sequences (Dr. GRPO, arXiv 2503.20783).
    """
    losses = losses.masked_fill(~batch.mask, 0.0)
    match settings.aggregation:
        case "token_mean":
            return losses.sum() / size.tokens
        case "sequence_mean":
            return (losses / batch.lengths[batch.sequence]).sum() / size.sequences
        case "fixed_length":
            return losses.sum() / (settings.fixed_length * size.sequences)

"""On-policy distillation: the teacher's log-probabilities are the reward of each token."""

from __future__ import annotations

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats


def distillation(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return teacher_logprobs - sampled_logprobs of each token, shape (T,).

    This is minus the k1 estimate of KL(policy || teacher), without discount: each token is judged
    alone. Rewards are not used.
    Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649; as an
    advantage: Thinking Machines Lab, "On-Policy Distillation", 2025.

    Raises:
        ValueError: the batch has no teacher_logprobs.
    """
    if batch.teacher_logprobs is None:
        raise ValueError("distillation needs teacher_logprobs, and the batch has none")
    return batch.teacher_logprobs - batch.sampled_logprobs

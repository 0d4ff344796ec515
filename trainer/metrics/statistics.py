"""Statistics of training, and their fold to `WeightVersion.metrics`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from schemas.ids import parse_version


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One optimiser step.

    Attributes:
        tokens: trained tokens.
        passed_tokens: tokens of sequences that passed through the model; those without advantage
            do not.
        loss: mean over the tokens; None if the step was skipped.
        grad_norm: before clipping; None if the step was skipped.
        skipped: the loss or gradient that is not finite; None if the step was taken.
        truncated_tokens: passed tokens whose ratio is above the bound.
        now_at_zero: passed tokens to which the policy gives probability zero; they are not trained.
        logp_diff: largest |trainer - sampled| over the passed tokens; None if not measured.
        logp_diff_same_version: the same over the tokens sampled by the trainer's current weights;
            None if not measured or without such a token.
    """

    tokens: int
    passed_tokens: int
    loss: float | None
    grad_norm: float | None
    skipped: str | None
    truncated_tokens: int
    now_at_zero: int
    logp_diff: float | None
    logp_diff_same_version: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """The optimiser steps of one batch, and the seconds they took."""

    steps: tuple[StepStats, ...]
    seconds: float

    @property
    def changed_weights(self) -> bool:
        return any(step.skipped is None for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """One trained batch.

    Attributes:
        rewards: of the trained members that have one.
        members: trained members.
        tokens: trained tokens.
        unrewarded: members without a training reward.
        sequences_outside_vocabulary: excluded for token ids that the model does not have.
        sampled_at_zero: tokens excluded for an infinite recorded log-probability.
        staleness: see `staleness`.
        read_seconds: time to read the payload.
    """

    update: UpdateStats
    rewards: tuple[float, ...]
    groups: int
    members: int
    sequences: int
    tokens: int
    unrewarded: int
    sequences_outside_vocabulary: int
    sampled_at_zero: int
    staleness: tuple[int, int]
    read_seconds: float


def staleness(tokens: Mapping[str, int], run_id: str, sync_index: int) -> tuple[int, int]:
    """Return the sum of the staleness over trained tokens, and the number of these tokens.

    Counts the versions of this run; the staleness of a token is sync_index minus the sync index of
    its version.

    Args:
        tokens: number of trained tokens of each version.
        run_id: of the trainer.
        sync_index: of the version that training starts from.
    """
    total = known = 0
    for name, number in tokens.items():
        version = parse_version(name)
        if version is not None and version.run_id == run_id:
            total += (sync_index - version.sync_index) * number
            known += number
    return total, known


def version_metrics(
    batches: Sequence[BatchStats], lr: float, save_seconds: float
) -> dict[str, float]:
    """Return the metrics of a version trained from these batches; unmeasured ones are absent."""
    steps = [step for batch in batches for step in batch.update.steps]
    rewards = [r for batch in batches for r in batch.rewards]
    known = sum(batch.staleness[1] for batch in batches)
    passed = sum(step.passed_tokens for step in steps)
    found: dict[str, float | None] = {
        "loss": _mean(step.loss for step in steps),
        "grad_norm": _mean(step.grad_norm for step in steps),
        "ratio_truncated_share": sum(step.truncated_tokens for step in steps) / passed
        if passed
        else None,
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
        "staleness_mean": sum(batch.staleness[0] for batch in batches) / known if known else None,
        "logp_max_abs_diff": _largest(step.logp_diff for step in steps),
        "logp_max_abs_diff_same_version": _largest(step.logp_diff_same_version for step in steps),
        "save_seconds": save_seconds,
    }
    if batches:
        found |= {
            "lr": lr,
            "batches": len(batches),
            "groups": sum(batch.groups for batch in batches),
            "members": sum(batch.members for batch in batches),
            "members_unrewarded": sum(batch.unrewarded for batch in batches),
            "sequences_outside_vocabulary": sum(
                batch.sequences_outside_vocabulary for batch in batches
            ),
            "sequences": sum(batch.sequences for batch in batches),
            "tokens": sum(batch.tokens for batch in batches),
            "tokens_passed": passed,
            "tokens_sampled_at_zero": sum(batch.sampled_at_zero for batch in batches),
            "tokens_now_at_zero": sum(step.now_at_zero for step in steps),
            "optimizer_steps": sum(step.skipped is None for step in steps),
            "optimizer_steps_skipped": sum(step.skipped is not None for step in steps),
            "read_seconds": sum(batch.read_seconds for batch in batches),
            "train_seconds": sum(batch.update.seconds for batch in batches),
        }
    return {name: float(value) for name, value in found.items() if value is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)

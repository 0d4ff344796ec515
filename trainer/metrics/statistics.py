"""Statistics of training, and their fold to `WeightVersion.metrics`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, pstdev
from typing import NamedTuple

from clawstream.schemas.ids import parse_version


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Sums and maxima over tokens of one optimiser step. r: importance ratio to the sampling
    version; tokens that the policy gives probability zero are left out.

    Attributes:
        tokens: number of tokens.
        logprobs: sum of the log-probabilities.
        ratios, squared_ratios, largest_ratio: sums of r and r^2, and the largest r.
        kl_sampled: sum of r - 1 - log r.
        kl_reference, entropy: sums, in nats; None without a reference model, and if the loss needs
            no entropy.
        clipped, corrected: tokens that the loss clips, and whose weight a correction changes; None
            if the algorithm does not.
        clipped_positive, clipped_negative: of the tokens with a positive (negative) advantage: how
            many the loss clips, and their number; None as above.
        logp_diff: largest |trainer - sampled|; None if not measured.
        same_version: of the tokens that the trainer's current weights sampled: their number, sum
            and largest |trainer - sampled|; None if not measured or without such a token.
        own: sums of the metrics of a user's own loss, by the name of the metric.
    """

    tokens: int
    logprobs: float
    ratios: float
    squared_ratios: float
    largest_ratio: float
    kl_sampled: float
    kl_reference: float | None
    entropy: float | None
    clipped: int | None
    clipped_positive: tuple[int, int] | None
    clipped_negative: tuple[int, int] | None
    corrected: int | None
    logp_diff: float | None
    same_version: tuple[int, float, float] | None
    own: Mapping[str, float] = field(default_factory=dict)


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
        now_at_zero: passed tokens to which the policy gives probability zero; they are not trained.
        sequence_tokens: tokens of the sequences that passed, context included.
        computed_tokens: tokens of the passes: a shared prefix is computed once. No padding.
        flops: of the model in forward and backward passes.
        measured: over the passed tokens; None without one, or if the step was skipped.
    """

    tokens: int
    passed_tokens: int
    loss: float | None
    grad_norm: float | None
    skipped: str | None
    now_at_zero: int
    sequence_tokens: int
    computed_tokens: int
    flops: float
    measured: TokenStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """The optimiser steps of one batch, and the seconds they took.

    peak_flops: of the device, a second; None if unknown.
    """

    steps: tuple[StepStats, ...]
    seconds: float
    peak_flops: float | None

    @property
    def updates(self) -> int:
        """Number of steps taken, each of which changed the weights."""
        return sum(step.skipped is None for step in self.steps)


NO_UPDATE = UpdateStats(steps=(), seconds=0.0, peak_flops=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """The optimiser steps of the critic on one batch.

    Attributes:
        losses: of the steps taken.
        skipped: the losses and gradients that were not finite, of the other steps.
        explained_variance: of the returns, by the values before the first step; None if it is not
            defined.
    """

    losses: tuple[float, ...]
    skipped: tuple[str, ...]
    explained_variance: float | None
    seconds: float


class Staleness(NamedTuple):
    """Staleness of the trained tokens of this run, in versions.

    Attributes:
        total: sum over the tokens.
        tokens: their number.
        largest: of one token; None without one.
    """

    total: int
    tokens: int
    largest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStats:
    """The data of one environment in a trained batch.

    Attributes:
        environment: a name in `trainer.environments`; None: all others.
        rewards: of the trained members that have one.
        members: trained members.
        tokens: trained tokens.
        lengths: trained tokens of each trajectory that has some.
        turns: steps of all trained members.
        unrewarded: members without a training reward.
        outside_vocabulary: tokens excluded for token ids that the model does not have.
        with_media: tokens excluded for images, videos or sounds.
        sampled_at_zero: tokens excluded for an infinite recorded log-probability.
        staleness: see `staleness`.
    """

    environment: str | None = None
    rewards: tuple[float, ...]
    groups: int
    members: int
    sequences: int
    tokens: int
    lengths: tuple[int, ...]
    turns: int
    unrewarded: int
    outside_vocabulary: int
    with_media: int
    sampled_at_zero: int
    staleness: Staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """One trained batch.

    Attributes:
        data: of each environment.
        read_seconds: time to read the payload.
        wait_seconds: time without work before the batch.
        device_bytes: largest memory of tensors on the device of this process; None on a CPU.
        critic: None for an algorithm without one.
    """

    update: UpdateStats
    data: tuple[DataStats, ...]
    read_seconds: float
    critic: CriticStats | None = None
    wait_seconds: float = 0.0
    device_bytes: int | None = None


def staleness(tokens: Mapping[str, int], run_id: str, sync_index: int) -> Staleness:
    """Return the staleness of trained tokens of this run.

    The staleness of a token is sync_index minus the sync index of its version.

    Args:
        tokens: number of trained tokens of each version.
        run_id: of the trainer.
        sync_index: of the version that training starts from.
    """
    known = [
        (sync_index - version.sync_index, number)
        for name, number in tokens.items()
        if (version := parse_version(name)) is not None and version.run_id == run_id
    ]
    return Staleness(
        total=sum(age * number for age, number in known),
        tokens=sum(number for _, number in known),
        largest=max((age for age, _ in known), default=None),
    )


def version_metrics(
    batches: Sequence[BatchStats], lr: float, save_seconds: float
) -> dict[str, float]:
    """Return the metrics of a version trained from these batches; unmeasured ones are absent.

    `clawstream.trainer.metrics.definitions` describes each.
    """
    found: dict[str, float | None] = {"save_seconds": save_seconds}
    if batches:
        found |= {"lr": lr, **_data(batches), **_updates(batches), **_critic(batches)}
        found |= _tokens(
            [s.measured for b in batches for s in b.update.steps if s.measured is not None]
        )
        found |= _environments(batches)
    return {name: float(value) for name, value in found.items() if value is not None}


def _data(batches: Sequence[BatchStats]) -> dict[str, float | None]:
    """Return what the batches contained."""
    parts = [part for batch in batches for part in batch.data]
    rewards = [r for part in parts for r in part.rewards]
    lengths = [length for part in parts for length in part.lengths]
    members = sum(part.members for part in parts)
    return {
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
        "batches": len(batches),
        "groups": sum(part.groups for part in parts),
        "members": members,
        "members_unrewarded": sum(part.unrewarded for part in parts),
        "sequences": sum(part.sequences for part in parts),
        "tokens_outside_vocabulary": sum(part.outside_vocabulary for part in parts),
        "tokens_with_media": sum(part.with_media for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "tokens_sampled_at_zero": sum(part.sampled_at_zero for part in parts),
        "length_mean": _mean(lengths),
        "length_max": _largest(lengths),
        "turns_mean": _share(sum(part.turns for part in parts), members),
        "staleness_mean": _share(
            sum(part.staleness.total for part in parts),
            sum(part.staleness.tokens for part in parts),
        ),
        "staleness_max": _largest(part.staleness.largest for part in parts),
        "read_seconds": sum(batch.read_seconds for batch in batches),
        "wait_seconds": sum(batch.wait_seconds for batch in batches),
        "device_memory_peak": _largest(batch.device_bytes for batch in batches),
    }


def _environments(batches: Sequence[BatchStats]) -> dict[str, float | None]:
    """Return the metrics of each environment that the settings name."""
    rewards: dict[str, list[float]] = {}
    for batch in batches:
        for part in batch.data:
            if part.environment is not None:
                rewards.setdefault(part.environment, []).extend(part.rewards)
    return {f"environment/{name}/reward_mean": _mean(found) for name, found in rewards.items()}


def _updates(batches: Sequence[BatchStats]) -> dict[str, float | None]:
    """Return what the optimiser did, and how fast."""
    steps = [step for batch in batches for step in batch.update.steps]
    seconds = sum(batch.update.seconds for batch in batches)
    computed = sum(step.computed_tokens for step in steps)
    saved = _share(computed, sum(step.sequence_tokens for step in steps))
    speed = _share(sum(step.flops for step in steps), seconds)
    peak = batches[-1].update.peak_flops
    return {
        "loss": _mean(step.loss for step in steps),
        "grad_norm": _mean(step.grad_norm for step in steps),
        "grad_norm_max": _largest(step.grad_norm for step in steps),
        "optimizer_steps": sum(step.skipped is None for step in steps),
        "optimizer_steps_skipped": sum(step.skipped is not None for step in steps),
        "tokens_passed": sum(step.passed_tokens for step in steps),
        "tokens_now_at_zero": sum(step.now_at_zero for step in steps),
        "tokens_computed": computed,
        "prefix_saved_share": None if saved is None else 1 - saved,
        "train_seconds": seconds,
        "tokens_per_second": _share(computed, seconds),
        "model_tflops": None if speed is None else speed / 1e12,
        "mfu": None if speed is None or peak is None else speed / peak,
    }


def _critic(batches: Sequence[BatchStats]) -> dict[str, float | None]:
    """Return what the critic learned."""
    critics = [batch.critic for batch in batches if batch.critic is not None]
    return {
        "value_loss": _mean(loss for critic in critics for loss in critic.losses),
        "explained_variance": _mean(critic.explained_variance for critic in critics),
        "critic_seconds": sum(critic.seconds for critic in critics) if critics else None,
    }


def _tokens(steps: Sequence[TokenStats]) -> dict[str, float | None]:
    """Return means and maxima over the passed tokens of the steps taken."""
    tokens = sum(s.tokens for s in steps)
    ratios, squares = sum(s.ratios for s in steps), sum(s.squared_ratios for s in steps)
    same = [s.same_version for s in steps if s.same_version is not None]

    def mean(of: Callable[[TokenStats], float | None]) -> float | None:
        known = [(value, s.tokens) for s in steps if (value := of(s)) is not None]
        return _share(sum(value for value, _ in known), sum(number for _, number in known))

    surprise = mean(lambda s: s.logprobs)
    return {
        "entropy": None if surprise is None else -surprise,
        "entropy_exact": mean(lambda s: s.entropy),
        "kl_sampled": mean(lambda s: s.kl_sampled),
        "kl_reference": mean(lambda s: s.kl_reference),
        "ratio_mean": _share(ratios, tokens),
        "ratio_max": max((s.largest_ratio for s in steps if s.tokens), default=None),
        "ratio_ess": _share(ratios * ratios, tokens * squares),
        "clip_fraction": mean(lambda s: s.clipped),
        "clip_fraction_positive": _pairs(s.clipped_positive for s in steps),
        "clip_fraction_negative": _pairs(s.clipped_negative for s in steps),
        "correction_fraction": mean(lambda s: s.corrected),
        **{name: mean(partial(_own, name)) for s in steps for name in s.own},
        "logp_max_abs_diff": _largest(s.logp_diff for s in steps),
        "logp_mean_abs_diff_same_version": _share(sum(s[1] for s in same), sum(s[0] for s in same)),
        "logp_max_abs_diff_same_version": _largest(s[2] for s in same),
    }


def _own(name: str, stats: TokenStats) -> float | None:
    return stats.own.get(name)


def _pairs(pairs: Iterable[tuple[int, int] | None]) -> float | None:
    """Return the share of the first numbers in the second ones."""
    known = [pair for pair in pairs if pair is not None]
    return _share(sum(part for part, _ in known), sum(whole for _, whole in known))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)

"""The fold from optimiser steps and batches to the metrics of a version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.trainer.metrics.definitions import METRICS, headline, label_of, reference
from clawstream.trainer.metrics.statistics import (
    BatchStats,
    CriticStats,
    DataStats,
    Staleness,
    StepStats,
    TokenStats,
    UpdateStats,
    version_metrics,
)
from clawstream.trainer.metrics.validation import summary

PAGE = Path(__file__).parents[4] / "docs" / "trainer.md"
TOKENS = TokenStats(
    tokens=2,
    logprobs=-3.0,
    ratios=4.0,
    squared_ratios=10.0,
    largest_ratio=3.0,
    kl_sampled=1.0,
    kl_reference=0.5,
    entropy=2.0,
    clipped=1,
    clipped_positive=(0, 1),
    clipped_negative=(1, 1),
    corrected=2,
    logp_diff=0.5,
    same_version=(2, 0.5, 0.4),
    own={"own/pull": 3.0},
)
FIRST = StepStats(
    tokens=4,
    passed_tokens=3,
    loss=1.0,
    grad_norm=2.0,
    skipped=None,
    now_at_zero=1,
    sequence_tokens=40,
    computed_tokens=10,
    flops=1e12,
    measured=TOKENS,
)
THEN = replace(
    FIRST,
    loss=3.0,
    grad_norm=4.0,
    now_at_zero=0,
    measured=replace(
        TOKENS, tokens=6, ratios=6.0, squared_ratios=6.0, largest_ratio=1.0, clipped=0,
        clipped_positive=(0, 4), clipped_negative=(0, 2),
        logp_diff=None, same_version=None, kl_reference=None,
        own={},
    ),
)  # fmt: skip
LOST = replace(THEN, passed_tokens=2, loss=None, grad_norm=None, skipped="NaN", measured=None)
DATA = DataStats(
    rewards=(0.0, 1.0),
    groups=1,
    members=2,
    sequences=2,
    tokens=6,
    lengths=(5, 1),
    turns=6,
    unrewarded=0,
    outside_vocabulary=0,
    with_media=0,
    sampled_at_zero=5,
    staleness=Staleness(4, 8, 2),
)
MATH = DataStats(
    environment="math", rewards=(1.0, 0.0), groups=0, members=1, sequences=0, tokens=2,
    lengths=(3,), turns=0, unrewarded=0, outside_vocabulary=0, with_media=0,
    sampled_at_zero=0, staleness=Staleness(0, 0, None),
)  # fmt: skip
BATCH = BatchStats(
    update=UpdateStats(steps=(FIRST, THEN, LOST), seconds=1.0, peak_flops=1e13),
    data=(DATA, MATH),
    read_seconds=0.5,
    wait_seconds=2.0,
    device_bytes=7,
    critic=CriticStats(losses=(1.0, 3.0), skipped=("NaN",), explained_variance=0.5, seconds=0.25),
)


def test_metrics_fold_the_batches_of_a_version() -> None:
    got = version_metrics([BATCH, BATCH], 1e-3, 0.25)
    assert got == pytest.approx(
        {
            "reward_mean": 0.5, "reward_std": 0.5,
            "batches": 2, "groups": 2, "members": 6, "members_unrewarded": 0, "sequences": 4,
            "tokens_outside_vocabulary": 0, "tokens_with_media": 0, "tokens": 16,
            "tokens_passed": 16,
            "tokens_sampled_at_zero": 10, "tokens_now_at_zero": 2, "tokens_computed": 60,
            "prefix_saved_share": 0.75,
            "length_mean": 3, "length_max": 5, "turns_mean": 2,
            "staleness_mean": 0.5, "staleness_max": 2,
            "environment/math/reward_mean": 0.5,
            "loss": 2, "grad_norm": 3, "grad_norm_max": 4, "lr": 1e-3,
            "optimizer_steps": 4, "optimizer_steps_skipped": 2,
            "value_loss": 2, "explained_variance": 0.5, "critic_seconds": 0.5,
            "entropy": 0.75, "entropy_exact": 0.5, "kl_sampled": 0.25, "kl_reference": 0.25,
            "ratio_mean": 10 / 8, "ratio_max": 3, "ratio_ess": 20 * 20 / (16 * 32),
            "clip_fraction": 1 / 8, "clip_fraction_positive": 0, "clip_fraction_negative": 1 / 3,
            "correction_fraction": 0.5,
            "logp_mean_abs_diff_same_version": 0.25, "logp_max_abs_diff_same_version": 0.4,
            "logp_max_abs_diff": 0.5, "own/pull": 1.5,
            "wait_seconds": 4, "device_memory_peak": 7,
            "read_seconds": 1, "train_seconds": 2, "save_seconds": 0.25,
            "tokens_per_second": 30, "model_tflops": 3, "mfu": 0.3,
        }
    )  # fmt: skip
    validation = summary(0, [[0.0], [1.0]]).metrics
    of_several_versions = {"reward_fall"}  # test_trend.py
    names = {label_of(name)[0] for name in (*got, *validation)} | of_several_versions
    assert names == METRICS.keys(), "a definition has a value, and vice versa"


def test_what_was_not_measured_is_absent() -> None:
    nothing_learned = version_metrics(
        [replace(BATCH, update=UpdateStats(steps=(LOST,), seconds=1.0, peak_flops=None))], 0.1, 0.0
    )
    assert nothing_learned["optimizer_steps"] == 0.0
    assert nothing_learned.keys().isdisjoint(
        {"loss", "grad_norm", "entropy", "ratio_mean", "ratio_ess", "clip_fraction", "mfu"}
    )
    assert version_metrics([], 1e-3, 0.25) == {"save_seconds": 0.25}


def test_the_log_line_has_the_headline_metrics_in_short() -> None:
    assert headline({"loss": 1.234567, "lr": 1.0, "reward_mean": 2 / 3, "unknown": 1.0}) == {
        "reward_mean": 0.6667,
        "loss": 1.235,
    }


def test_the_documentation_has_the_table_of_all_metrics() -> None:
    assert "\n".join(reference()) in PAGE.read_text()

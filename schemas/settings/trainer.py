"""The trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from schemas.settings.base import Count, Positive, Section


class TrainerSettings(Section):
    """The learner."""

    model_path: Path | None = Field(
        None, description="Hugging Face directory of the initial weights"
    )
    weights_dir: Path | None = Field(
        None, description="where versions are published; default <data_dir>/weights"
    )
    checkpoint_dir: Path | None = Field(None, description="default <data_dir>/checkpoints")
    keep_checkpoints: Count = Field(2, description="disk")
    keep_versions: Count = Field(5, description="disk; workers load only the newest")
    sync_every: Count = Field(1, description="must equal admit.policy.sync_every")
    max_versions: Annotated[int, Field(ge=0)] | None = Field(
        None, description="stop after this many versions"
    )
    first_attempt: Annotated[int, Field(ge=0)] = Field(
        0,
        description="lowest attempt of version ids; a replay sets it above those in recorded data",
    )
    lr: Positive = Field(1e-6, description="learning rate at the first version")
    lr_final: Positive | None = Field(
        None, description="falls linearly to it at max_versions; default: constant"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.99, ge=0, lt=1, description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW")
    max_grad_norm: Positive = Field(1.0, description="clipping")
    minibatches: Count = Field(2, description="optimiser steps a batch and epoch")
    epochs: Count = Field(1, description="passes over a batch")
    micro_batch_tokens: Count = Field(16384, description="memory: padded tokens a forward pass")
    is_truncation: Positive = Field(
        2.0, description="upper bound of the token-level importance ratio"
    )
    advantage_std_offset: Annotated[float, Field(ge=0)] = Field(
        0.3,
        description="added to a group's standard deviation; limits advantages of nearly solved "
        "groups",
    )
    temperature: Positive = Field(1.0, description="assumed temperature of steps that record none")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cpu to ignore a GPU")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="bfloat16: faster passes with less memory; trained weights are always float32",
    )
    threads: Count = Field(1, description="CPU cores for torch")
    seed: int = Field(0, description="repeat runs")

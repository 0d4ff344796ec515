"""The trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from clawstream.schemas.settings.base import Count, Positive, Section

NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class AlgorithmOverrides(Section):
    """Parts and numbers of the algorithm; each default is the algorithm's own (algorithms.md)."""

    advantage: str | None = Field(
        None, description="another estimator: its name, or path.to:function of your own"
    )
    loss: str | None = Field(
        None, description="another loss: its name, or path.to:function of your own"
    )
    std_offset: NotNegative | None = Field(
        None,
        description="added to a standard deviation; limits advantages of nearly solved groups",
    )
    gamma: Share | None = Field(None, description="discount of later rewards")
    gae_lambda: Share | None = Field(
        None, description="lower: less variance, more trust in the critic"
    )
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] | None = Field(
        None, description="how long and short sequences weigh against each other"
    )
    fixed_length: Count | None = Field(
        None, description="tokens; divisor of aggregation=fixed_length"
    )
    clip_low: Share | None = Field(None, description="ratios are clipped to 1 - clip_low")
    clip_high: Positive | None = Field(
        None, description="ratios are clipped to 1 + clip_high; raise it to keep exploring"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="bound of the ratio of tokens with a negative advantage; a large number: none",
    )
    ratio_max: Positive | None = Field(
        None, description="upper bound of the detached ratio of CISPO"
    )
    mask_low: Share | None = Field(None, description="DPPO: largest fall of a probability")
    mask_high: Share | None = Field(None, description="DPPO: largest rise of a probability")
    log_ratio_penalty: NotNegative | None = Field(
        None, description="DPPO: pull towards the sampling version"
    )
    kl_coef: NotNegative | None = Field(
        None, description="pull towards a reference model; needs one"
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None, description="estimate of the divergence"
    )
    kl_in: Literal["loss", "reward"] | None = Field(
        None, description="divergence as a loss term, or subtracted from rewards"
    )
    entropy_coef: NotNegative | None = Field(
        None, description="entropy bonus, against early collapse"
    )
    correction: Literal["none", "truncate", "mask"] | None = Field(
        None, description="importance weights out of bounds: for stale data or a lossy engine"
    )
    correction_level: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="weights of tokens, or the product or geometric mean of a sequence"
    )
    correction_min: NotNegative | None = Field(
        None, description="correction=mask: lower bound of a weight"
    )
    correction_max: Positive | None = Field(None, description="upper bound of a weight")

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name, value in self if value is not None}


class CriticSettings(Section):
    """The value model of algorithms with a critic; the others do not load it."""

    path: Path | None = Field(
        None,
        description="Hugging Face directory of its initial weights, with the policy's tokenizer; "
        "default trainer.model_path",
    )
    lr: Positive = Field(1e-5, description="learning rate, constant; usually above the policy's")
    clip: Positive = Field(
        0.5, description="largest useful change of a value in a batch; scale it with the rewards"
    )
    warmup_versions: Annotated[int, Field(ge=0)] = Field(
        2, description="versions that train only the critic, before its values steer the policy"
    )


class LoraSettings(Section):
    """Low-rank adapters instead of all weights; versions are then adapters (scale.md)."""

    rank: Annotated[int, Field(ge=1, le=512)] | None = Field(
        None, description="train adapters of this rank: less memory, smaller versions"
    )
    alpha: Positive = Field(32.0, description="an adapter's output is scaled by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        ("all-linear",),
        description="names of the layers with an adapter, e.g. q_proj, v_proj; all-linear: every "
        "linear layer but the output head",
    )


class TrainerSettings(Section):
    """The learner."""

    model_path: Path | None = Field(
        None, description="Hugging Face directory of the initial weights"
    )
    weights_uri: str | None = Field(
        None,
        description="where versions are published: a path, or a URL of fsspec for workers on other "
        "machines; default <data_dir>/weights",
    )
    full_every: Annotated[int, Field(ge=1, le=1000)] = Field(
        1,
        description="every so many versions is full, the others are deltas; raise it where weights "
        "go over a network",
    )
    checkpoint_dir: Path | None = Field(None, description="default <data_dir>/checkpoints")
    checkpoint_uri: str | None = Field(
        None,
        description="a URL of fsspec: checkpoints are copied there, and a trainer on a new disk "
        "resumes from there",
    )
    save_every: Count = Field(
        1,
        description="versions for each checkpoint; raise it for large models: a crash trains up to "
        "so many versions again",
    )
    keep_checkpoints: Count = Field(2, description="disk")
    keep_versions: Count = Field(5, description="disk; workers load only the newest")
    keep_best_by: str | None = Field(
        None, description="a metric, e.g. val/reward_mean: the version with its highest value stays"
    )
    max_versions: Annotated[int, Field(ge=0)] | None = Field(
        None, description="stop after this many versions"
    )
    first_attempt: Annotated[int, Field(ge=0)] = Field(
        0,
        description="lowest attempt of version ids; a replay sets it above those in recorded data",
    )
    lr: Positive = Field(1e-6, description="learning rate")
    lr_warmup_versions: Annotated[int, Field(ge=0)] = Field(
        0, description="rises linearly to lr over so many versions"
    )
    lr_decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how lr falls to lr_final, from the warm-up to max_versions"
    )
    lr_final: NotNegative = Field(0.0, description="learning rate at max_versions")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.99, ge=0, lt=1, description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW")
    max_grad_norm: Positive = Field(1.0, description="clipping")
    minibatches: Count = Field(2, description="optimiser steps a batch and epoch")
    epochs: Count = Field(1, description="passes over a batch")
    micro_batch_tokens: Count = Field(
        16384, description="memory: tokens a forward pass, padding included"
    )
    lora: LoraSettings = LoraSettings()
    algorithm: AlgorithmOverrides = AlgorithmOverrides()
    environments: tuple[str, ...] = Field(
        (),
        description="a batch mixes environments: their names, which are `environment` in the "
        "metadata of their tasks; advantages are estimated in each alone, with metrics of each",
    )
    critic: CriticSettings = CriticSettings()
    reference_path: Path | None = Field(
        None,
        description="Hugging Face directory of a frozen reference model, for "
        "trainer.algorithm.kl_coef",
    )
    teacher_path: Path | None = Field(
        None, description="Hugging Face directory of a teacher, for algorithm distillation"
    )
    recompute_old_logprobs: bool | None = Field(
        None,
        description="old log-probabilities from the trainer, by one more forward pass a batch; "
        "needed for trainer.algorithm.correction of losses with a clipped ratio. Default: for the "
        "loss gspo, whose bounds are narrower than the differences between engine and trainer",
    )
    temperature: Positive = Field(1.0, description="assumed temperature of steps that record none")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cpu to ignore a GPU")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="bfloat16: faster passes with less memory; trained weights are always float32",
    )
    peak_tflops: Positive | None = Field(
        None,
        description="peak of the device in TFLOP/s, for the metric mfu; default: of known GPUs",
    )
    packing: Literal["tree", "rows"] = Field(
        "tree",
        description="tree: sequences without padding, a shared prefix once; rows: one padded row "
        "each, as a model with sliding-window or recurrent layers gets in any case",
    )
    freeze_vision: bool = Field(
        False,
        description="a vision-language model: do not train its vision tower; less memory, and "
        "usual where images look like those of its pretraining",
    )
    compile: bool = Field(
        False,
        description="CUDA: let torch compile each layer, which fuses its operations; the first "
        "steps take a minute longer",
    )
    activation_checkpointing: bool = Field(
        False,
        description="memory: compute each layer again in the backward pass, for a third more time",
    )
    record_tokens: Share = Field(
        1.0,
        description="share of trajectories whose trained tokens are recorded, with the trainer's "
        "log-probabilities and advantages; lower it where 4 bytes a token on Kafka and in the lake "
        "are too many, 0: none",
    )
    tensorboard_dir: Path | None = Field(
        None, description="write the metrics for TensorBoard; each run has a folder in it"
    )
    threads: Count = Field(1, description="CPU cores for torch")
    seed: int = Field(0, description="repeat runs")

"""The metrics of a weight version: the one list of names, units and meanings.

`statistics.version_metrics` computes them; the log, Prometheus, TensorBoard, the chart and the
table in docs/trainer.md show them. Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: key in `WeightVersion.metrics`.
        unit: of the value; "" for a number without one.
        text: what it is, for the documentation.
        total: a sum over the batches of a version: a Prometheus counter adds the versions up. The
            others are gauges.
        headline: shown in the log line of a version.
    """

    name: str
    unit: str
    text: str
    total: bool = False
    headline: bool = False


def _total(name: str, unit: str, text: str) -> Metric:
    return Metric(name, unit, text, total=True)


def _headline(name: str, unit: str, text: str) -> Metric:
    return Metric(name, unit, text, headline=True)


SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "reward": (
        _headline("reward_mean", "reward", "Mean training reward of the trained trajectories."),
        Metric("reward_std", "reward", "Their standard deviation, over n."),
        _headline(
            "reward_fall",
            "reward",
            "Training gets worse: the mean reward of the last 8 versions is so far below the best 8"
            " in a row. Absent unless chance does not explain the difference; see"
            " [When training gets worse](training-gets-worse.md).",
        ),
    ),
    "data": (
        _total("batches", "batches", "Trained batches."),
        _total("groups", "groups", "Trained groups."),
        _total("members", "trajectories", "Trained trajectories."),
        _total("members_unrewarded", "trajectories", "Not trained, for lack of a training reward."),
        _total("sequences", "sequences", "Trained paths of segment trees."),
        _total("tokens", "tokens", "Trained tokens, each counted once."),
        _total(
            "tokens_passed",
            "tokens",
            "Those in forward and backward passes, once for each epoch; sequences without advantage"
            " may need none.",
        ),
        _total(
            "tokens_sampled_at_zero", "tokens", "Not trained: infinite recorded log-probability."
        ),
        _total(
            "tokens_outside_vocabulary",
            "tokens",
            "Not trained: at or behind token ids that the model does not have.",
        ),
        _total(
            "tokens_with_media",
            "tokens",
            "Not trained: behind images, videos or sounds that are not passed to the model.",
        ),
        _total("tokens_now_at_zero", "tokens", "Not trained: the policy gives probability zero."),
        _total("tokens_computed", "tokens", "Tokens of all passes, context included, no padding."),
        Metric(
            "prefix_saved_share",
            "share",
            "Tokens of the passed sequences that were not computed, because another sequence of the"
            " pass has the same prefix.",
        ),
        _headline("length_mean", "tokens", "Trained tokens of a trajectory, mean."),
        Metric("length_max", "tokens", "Trained tokens of the longest trajectory."),
        Metric("turns_mean", "steps", "Steps of a trajectory, mean."),
        _headline(
            "staleness_mean",
            "versions",
            "Versions between the trained and the sampling one, mean over trained tokens of this"
            " run.",
        ),
        Metric("staleness_max", "versions", "Of the oldest trained token of this run."),
    ),
    "optimizer": (
        _headline("loss", "", "Mean over the optimizer steps taken."),
        _headline("grad_norm", "", "Norm of the gradient before clipping, mean over the steps."),
        Metric("grad_norm_max", "", "Largest norm before clipping."),
        Metric("lr", "", "Learning rate."),
        _total("optimizer_steps", "steps", "Optimizer steps taken."),
        _total(
            "optimizer_steps_skipped",
            "steps",
            "Steps not taken: loss or gradient was infinite or NaN.",
        ),
    ),
    "critic": (
        _headline("value_loss", "", "Of the critic, mean over its optimizer steps."),
        _headline(
            "explained_variance",
            "",
            "1 - Var(R - V) / Var(R) of the critic's values before the update: 1 at best; 0 or less"
            " if they predict nothing.",
        ),
        _total("critic_seconds", "seconds", "Time of the critic's updates."),
    ),
    "policy": (
        _headline(
            "entropy",
            "nats",
            "Minus the mean log-probability of the trained tokens: an estimate of the entropy from"
            " samples, which costs no pass. Exact only in expectation, for fresh tokens.",
        ),
        Metric(
            "entropy_exact", "nats", "Of the whole distributions; with `entropy_coef` above 0 only."
        ),
        _headline(
            "kl_sampled",
            "nats",
            "Divergence of the policy from the versions that sampled, estimator k3: the mean of"
            " r - 1 - log r.",
        ),
        Metric(
            "kl_reference",
            "nats",
            "Divergence from the reference model, estimator k3; with `kl_coef` above 0 only.",
        ),
        Metric(
            "ratio_mean",
            "",
            "Importance ratio r = p_now / p_sampled of trained tokens, mean. Log-ratios are limited"
            " to 20 in size for the metrics.",
        ),
        Metric("ratio_max", "", "Largest importance ratio."),
        _headline(
            "ratio_ess",
            "share",
            "Effective sample size of the importance ratios, (sum r)^2 / (n sum r^2): 1 if they are"
            " all equal.",
        ),
        _headline(
            "clip_fraction",
            "share",
            "Trained tokens that the loss clips. `ppo_clip`, `gspo`: no gradient, because the ratio"
            " is out of bounds (or above `dual_clip`); `cispo`: ratio above `ratio_max`; `dppo`:"
            " masked. Absent for other losses.",
        ),
        Metric(
            "clip_fraction_positive",
            "share",
            "Of the tokens with a positive advantage, those that the loss clips.",
        ),
        Metric(
            "clip_fraction_negative",
            "share",
            "Of the tokens with a negative advantage, those that the loss clips. Far above the"
            " other one: the policy learns from good samples only.",
        ),
        Metric(
            "correction_fraction",
            "share",
            "Trained tokens whose weight `correction` truncates or masks; absent without it.",
        ),
        Metric(
            "own/<name>",
            "",
            "A metric of [your own loss](algorithms.md#your-own-estimator-or-loss), mean over the"
            " tokens that it was given.",
        ),
    ),
    "engine": (
        _headline(
            "logp_mean_abs_diff_same_version",
            "nats",
            "Mean |log p_trainer - log p_engine| over the tokens of the first minibatch that the"
            " trainer's current weights sampled.",
        ),
        Metric("logp_max_abs_diff_same_version", "nats", "The largest of these differences."),
        Metric(
            "logp_max_abs_diff",
            "nats",
            "The largest difference over all tokens of that minibatch, stale ones included.",
        ),
    ),
    "environment": (
        Metric(
            "environment/<name>/reward_mean",
            "reward",
            "`reward_mean` of an environment in `trainer.environments`.",
        ),
    ),
    "time": (
        _total(
            "wait_seconds",
            "seconds",
            "Time without work before the batches. Long: the engines sample too slowly for this"
            " trainer; none: they wait for it.",
        ),
        _total(
            "read_seconds",
            "seconds",
            "Time to read payload; of most batches while the one before trains.",
        ),
        _total("train_seconds", "seconds", "Time of the updates."),
        _total(
            "save_seconds",
            "seconds",
            "Time to write the weight files. Checkpoints are written in the background.",
        ),
        _headline("tokens_per_second", "tokens/s", "`tokens_computed` / `train_seconds`."),
        Metric(
            "model_tflops",
            "TFLOP/s",
            "Model FLOPs / `train_seconds`: 6 for each weight of a matrix (4 if it is frozen) and"
            " each computed token (of the head: each trained token), and 12 x layers x heads x head"
            " size for each attended pair.",
        ),
        Metric(
            "mfu",
            "share",
            "`model_tflops` / peak of the device. The peak is `trainer.peak_tflops`, or that of a"
            " known GPU for dense bfloat16; absent if it is unknown, as on a CPU.",
        ),
        Metric(
            "device_memory_peak",
            "bytes",
            "Largest memory of tensors on the GPU of the first process while it trained; absent on"
            " a CPU.",
        ),
    ),
    "val": (
        Metric(
            "val/reward_mean",
            "reward",
            "Mean training reward of the trajectories of channel `val` that the version sampled.",
        ),
        Metric(
            "val/reward_interval",
            "reward",
            "Half the width of its 95% interval, groups as clusters; absent for one group.",
        ),
        Metric("val/trajectories", "trajectories", "Their number."),
    ),
}
"""The metrics by section. A section is a heading in TensorBoard."""

METRICS: Mapping[str, Metric] = {m.name: m for part in SECTIONS.values() for m in part}
"""The metrics by name."""

ENVIRONMENT = "environment/"
OWN = "own/"
LABELS: Mapping[str, str] = {ENVIRONMENT: "environment", OWN: "name"}
"""Beginning of the name of a metric with a `<name>`, and the label that has that name."""


def label_of(name: str) -> tuple[str, str | None]:
    """Return the name of a metric in `METRICS`, and what stands for its `<name>`, if it has one."""
    if name.startswith(OWN):
        return f"{OWN}<name>", name.removeprefix(OWN)
    if not name.startswith(ENVIRONMENT):
        return name, None
    environment, _, metric = name.removeprefix(ENVIRONMENT).rpartition("/")
    return f"{ENVIRONMENT}<name>/{metric}", environment


SECTION_OF: Mapping[str, str] = {
    metric.name: section for section, part in SECTIONS.items() for metric in part
}
"""The section of each metric."""


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics for a log line, rounded to four significant digits, in list order."""
    return {
        name: float(f"{metrics[name]:.4g}")
        for name, metric in METRICS.items()
        if metric.headline and name in metrics
    }


def reference() -> Iterator[str]:
    """Yield the lines of the table in docs/trainer.md."""
    yield "| metric | unit | meaning |"
    yield "| --- | --- | --- |"
    for metric in METRICS.values():
        unit = metric.unit or "-"
        yield f"| `{metric.name}` | {unit} | {metric.text.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join((*reference(), "")))

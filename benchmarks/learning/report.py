"""The tables and charts of learning runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.learning.experiments import ALGORITHMS, STALENESS
from benchmarks.learning.run import Experiment, Result

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for an interval of 95 %, by the number of seeds."""

LABELS = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "ppo": "PPO, critic",
    "dapo": "DAPO",
    "cispo": "CISPO",
    "gspo": "GSPO",
}


def read_results(path: Path) -> list[Result]:
    """Return the results of a file of JSON lines."""
    return [Result.from_json(json.loads(line)) for line in path.read_text().splitlines()]


def algorithm_table(results: Sequence[Result]) -> str:
    """Return the scores of each algorithm as a Markdown table."""
    lines = ["| algorithm | version 0 | 10 | 25 | 50 | mean reward of the last 5 batches |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for result in _of(results, ALGORITHMS):
        scores = dict(result.scores)
        cells = [f"{scores[version]:.3f}" for version in (0, 10, 25, 50)]
        cells.append(f"{fmean(result.rewards[-5:]):.3f}")
        lines.append(f"| {LABELS[result.name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def staleness_table(results: Sequence[Result]) -> str:
    """Return the mean scores with fresh and stale data, with intervals, as a Markdown table."""
    lines = ["| sampling weights | seeds | 10 | 25 | 50 | mean of versions 5 to 50 |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for experiment in STALENESS:
        runs = _of(results, [experiment])
        cells = [_interval([dict(r.scores)[version] for r in runs]) for version in (10, 25, 50)]
        cells.append(_interval([fmean(score for _, score in r.scores[1:]) for r in runs]))
        lines.append(f"| {experiment.name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_algorithms(results: Sequence[Result], path: Path) -> None:
    """Draw the curve of each algorithm."""
    with _chart(path, "Algorithms, one seed") as axes:
        for result in _of(results, ALGORITHMS):
            axes.plot(*zip(*result.scores, strict=True), label=LABELS[result.name], linewidth=1.2)


def draw_staleness(results: Sequence[Result], path: Path) -> None:
    """Draw the means over the seeds with fresh and stale data, and their intervals."""
    with _chart(path, "RLOO, fresh samples and samples 4 versions old") as axes:
        for experiment in STALENESS:
            curves = [r.scores for r in _of(results, [experiment])]
            versions = [version for version, _ in curves[0]]
            columns = [[score for _, score in points] for points in zip(*curves, strict=True)]
            means, halves = [fmean(c) for c in columns], [_half_width(c) for c in columns]
            low = [mean - half for mean, half in zip(means, halves, strict=True)]
            high = [mean + half for mean, half in zip(means, halves, strict=True)]
            axes.plot(versions, means, label=experiment.name, linewidth=1.2)
            axes.fill_between(versions, low, high, alpha=0.2)


@contextmanager
def _chart(path: Path, title: str) -> Iterator[Any]:
    """Yield axes for held-out scores, and write them as an image."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    yield axes
    axes.set(title=title, xlabel="weight version", ylabel="held-out score", ylim=(0, 1))
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _of(results: Sequence[Result], experiments: Sequence[Experiment]) -> list[Result]:
    """Return the results of these experiments, in their order."""
    return [r for experiment in experiments for r in results if r.name == experiment.name]


def _interval(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ± {_half_width(values):.3f}"


def _half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean."""
    return T_95[len(values)] * float(stdev(values)) / float(len(values) ** 0.5)

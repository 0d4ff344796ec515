"""One learning run: sample, train, publish, load the new version, score it on held-out prompts."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.learning.batches import RUN, MemoryWeightLog, Reply, batch_of, start
from benchmarks.learning.task import HELD_OUT, TRAINED, sample
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.start import open_run
from clawstream.trainer.step import train_batch

GROUPS, MEMBERS = 16, 8
SCORE_EVERY = 5
"""Versions between two scores."""


@dataclass(frozen=True)
class Experiment:
    """What is run.

    Attributes:
        staleness: versions between the trained and the sampling weights.
        trainer: settings of the trainer beside those of every run.
    """

    name: str
    algorithm: str
    versions: int = 60
    staleness: int = 0
    trainer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A run's curves.

    Attributes:
        scores: (version, share of right replies to held-out prompts at temperature 1).
        rewards: mean reward of each batch.
        staleness_mean: of the last batch, in versions.
        cpu_seconds: of the process.
    """

    name: str
    algorithm: str
    seed: int
    scores: tuple[tuple[int, float], ...]
    rewards: tuple[float, ...]
    staleness_mean: float
    cpu_seconds: float

    @property
    def score(self) -> float:
        """The last score."""
        return self.scores[-1][1]

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        """Return the result of `as_json`."""
        scores = tuple((version, score) for version, score in fields.pop("scores"))
        return cls(scores=scores, **fields)


def learn(experiment: Experiment, seed: int, model: Path, data_dir: Path) -> Result:
    """Train the model on the task and return its curves. The same arguments give the same result.

    Args:
        experiment: what is run.
        seed: of prompts, samples and the trainer's shuffles.
        model: directory of the initial weights.
        data_dir: an empty directory.
    """
    began = time.process_time()
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    log = MemoryWeightLog()
    run = open_run(_settings(experiment, seed, model, data_dir), log, [], set(), start)
    engines = deque([_load(log.published[-1])], maxlen=experiment.staleness + 1)
    scores = [(0, _score(engines[-1]))]
    for seq in range(experiment.versions):
        prompts = rng.sample(TRAINED, GROUPS)
        samples = sample(engines[0], [p for p in prompts for _ in range(MEMBERS)], generator)
        version = log.published[max(seq - experiment.staleness, 0)].version_id
        replies = [Reply(s.prompt, s.tokens, s.logprobs, s.score, version) for s in samples]
        groups = [replies[i : i + MEMBERS] for i in range(0, len(replies), MEMBERS)]
        train_batch(run, batch_of(groups, experiment.algorithm, seq))
        run.publish()
        engines.append(_load(log.published[-1]))
        if (seq + 1) % SCORE_EVERY == 0:
            scores.append((seq + 1, _score(engines[-1])))
    run.end()
    metrics = [version.metrics for version in log.published[1:]]
    return Result(
        name=experiment.name,
        algorithm=experiment.algorithm,
        seed=seed,
        scores=tuple(scores),
        rewards=tuple(m["reward_mean"] for m in metrics),
        staleness_mean=metrics[-1]["staleness_mean"],
        cpu_seconds=round(time.process_time() - began, 1),
    )


def _settings(experiment: Experiment, seed: int, model: Path, data_dir: Path) -> Settings:
    trainer = {
        "model_path": model,
        "device": "cpu",
        "lr": 1e-3,
        "minibatches": 2,
        "seed": seed,
        "save_every": experiment.versions + 1,
        **experiment.trainer,
    }
    return Settings.model_validate({"run_id": RUN, "data_dir": data_dir, "trainer": trainer})


def _load(version: WeightVersion) -> Any:
    """Load a published version. The runs publish full ones on this machine."""
    directory = Path(version.files[0].url.removeprefix("file://")).parent
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).eval()


def _score(model: Any) -> float:
    """Return the share of right replies to the held-out prompts, the same draws each time."""
    samples = sample(model, HELD_OUT * 2, torch.Generator().manual_seed(0))
    return sum(s.score for s in samples) / len(samples)

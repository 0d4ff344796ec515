"""The runs of docs/learning-runs.md."""

from __future__ import annotations

from benchmarks.learning.run import Experiment

VERSIONS = 50
SEEDS = range(5)
"""Of the experiments with stale data; the algorithms run with seed 0."""

_ON_POLICY = {
    "grpo": {},
    "rloo": {},
    "reinforce_pp": {},
    "ppo": {"critic": {"lr": 1e-3}},
    "dapo": {},
    "cispo": {},
    # GSPO's own bounds are for replies of thousands of tokens.
    "gspo": {"algorithm": {"clip_low": 0.2, "clip_high": 0.2}},
}
ALGORITHMS = tuple(
    Experiment(name=name, algorithm=name, versions=VERSIONS, trainer=trainer)
    for name, trainer in _ON_POLICY.items()
)

_UNCORRECTED = {"algorithm": {"correction": "none"}}
STALENESS = (
    Experiment("fresh", "rloo", VERSIONS),
    Experiment("stale, corrected", "rloo", VERSIONS, staleness=4),
    Experiment("stale, not corrected", "rloo", VERSIONS, staleness=4, trainer=_UNCORRECTED),
)
"""RLOO samples from weights 4 versions old; its loss has importance weights, truncated at 2."""

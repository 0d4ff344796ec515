"""What sampling parameters mean for training: the temperature of the log-probabilities, and whether
they can be recomputed. Pure.

The trainer recomputes log-probabilities as log softmax(logits / temperature) over the whole
vocabulary, so temperature is the only parameter that it can reproduce.

vLLM's `--logprobs-mode` (v1/sample/sampler.py):

- `processed_logprobs`: the distribution that the token was drawn from: logits after penalties
  and constraints, divided by the temperature, cut by top_k, top_p and min_p. A greedy token
  (temperature 0) is drawn without a division, so its log-probability is that of temperature 1.
- `raw_logprobs`: the model's own logits, always at temperature 1.
"""

from __future__ import annotations

import math

from clawstream.schemas.records import Sampling

PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
LOWEST = 0.01
"""vLLM raises lower temperatures to this value. Logits divided by less may overflow."""


def logprobs_temperature(sampling: Sampling | None) -> float | None:
    """Return the temperature of the distribution of the log-probabilities; None if unknown."""
    if sampling is None:
        return None
    if sampling.logprobs_mode == RAW or sampling.temperature in (0.0, 1.0):
        return 1.0
    return sampling.temperature if sampling.logprobs_mode == PROCESSED else None


def why_unscored(sampling: Sampling | None, truncated: bool = False) -> str | None:
    """Return why the log-probabilities cannot be recomputed; None if they can. truncated: accept
    truncated, penalised and constrained distributions.
    """
    if sampling is None:
        return None
    if sampling.logprobs_mode not in (None, PROCESSED, RAW):
        return f"{sampling.logprobs_mode} instead of log-probabilities"
    if (t := sampling.temperature) is not None and t != 0.0 and not LOWEST <= t < math.inf:
        return f"sampled with temperature={t:g}"
    shaped = _shaped_by(sampling)
    if shaped and not truncated:
        return f"sampled with {', '.join(shaped)}"
    if sampling.temperature is not None and logprobs_temperature(sampling) is None:
        return "log-probabilities of an unknown temperature"
    return None


def _shaped_by(sampling: Sampling) -> list[str]:
    """Return the parameters, besides temperature, that changed the distribution."""
    neutral: dict[str, float] = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    if sampling.temperature != 0.0:  # the most probable token is never cut off
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0} | neutral
    given = {name: getattr(sampling, name) for name in neutral}
    shaped = [
        f"{name}={value:g}"
        for name, value in given.items()
        if value is not None and value != neutral[name] and not (name == "top_k" and value < 0)
    ]
    return [*shaped, *sampling.constraints]

"""Describe how vLLM samples a request, from its `SamplingParams` as they reach the engine: with the
defaults of model and server.

Nothing here imports vLLM: its objects are used by their attributes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from clawstream.schemas.records import Sampling

STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Constraints of `SamplingParams.structured_outputs`; exactly one of them is set."""
LIMITING = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens")
"""Other parameters that exclude tokens or change their logits, unless empty or 0."""
FORCING = ("thinking_token_budget", "trace_decode_token_ids")
"""Parameters that put tokens into the reply, also with the value 0."""


class ServerOptions(NamedTuple):
    """Options of the server that apply to every request. logprobs_mode: `--logprobs-mode`."""

    logprobs_mode: str
    logits_processors: bool
    watermark: bool


def server_options(client: Any) -> ServerOptions:
    """Read the options from vLLM's engine client."""
    model = client.model_config
    watermark = getattr(client.vllm_config, "watermark_config", None)
    return ServerOptions(model.logprobs_mode, bool(model.logits_processors), watermark is not None)


def sampling_of(params: Any, server: ServerOptions) -> Sampling:
    """Return how vLLM samples a request. params: SamplingParams."""
    return Sampling(
        source="engine",
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(int(params.top_k), 0),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        constraints=_constraints(params, server),
        logprobs_mode=server.logprobs_mode,
    )


def _constraints(params: Any, server: ServerOptions) -> tuple[str, ...]:
    structured = params.structured_outputs
    found = [
        name
        for name in STRUCTURED
        if structured is not None and getattr(structured, name) is not None
    ]
    found += [name for name in LIMITING if getattr(params, name)]
    found += [name for name in FORCING if getattr(params, name, None) is not None]
    if server.logits_processors:
        found.append("logits_processors")
    if server.watermark and getattr(params, "watermarking", None) is not False:
        found.append("watermark")
    return tuple(found)

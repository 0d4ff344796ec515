"""How vLLM samples a request: its `SamplingParams` as they reach the engine, where the model's and
the server's defaults are in them.

Nothing here imports vLLM: its objects are used by the attributes that they have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from schemas.records import Sampling

STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""What `SamplingParams.structured_outputs` may constrain by; exactly one of them is set."""
LIMITING = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens")
"""Other parameters that take tokens away, or change their logits. Empty or 0: they do not."""
FORCING = ("thinking_token_budget", "trace_decode_token_ids")
"""Those that put tokens into the reply; 0 does so too."""


class ServerOptions(NamedTuple):
    """What the server's own options decide for every request.

    logprobs_mode: vLLM's `--logprobs-mode`.
    """

    logprobs_mode: str
    logits_processors: bool
    watermark: bool


def server_options(client: Any) -> ServerOptions:
    """Of vLLM's engine client."""
    model = client.model_config
    watermark = getattr(client.vllm_config, "watermark_config", None)
    return ServerOptions(model.logprobs_mode, bool(model.logits_processors), watermark is not None)


def sampling_of(params: Any, server: ServerOptions) -> Sampling:
    """What vLLM does with a request. params: SamplingParams."""
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

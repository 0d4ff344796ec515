"""Defaults of a model call: the model and the limit of generated tokens. Pure.

Only the request to the engine changes. The recorded request keeps the client's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.protocols.base import Request
from gateway.protocols.request_fields import dumps, with_fields

OWN_MODEL = "default"
"""Model name that Claw-R1 agents send for the model that the engine serves."""
MODEL_OPTIONAL = ("openai.chat", "openai.completions")
REPLY_FIELDS: Mapping[str, tuple[str, ...]] = {
    "openai.chat": ("max_tokens", "max_completion_tokens"),
    "openai.completions": ("max_tokens",),
    "openai.responses": ("max_output_tokens",),
}
"""Fields that limit the generated tokens, by protocol; the first one is set.

Anthropic messages always carry a limit.
"""


def with_defaults(request: Request, protocol: str, default_max_tokens: int | None) -> Request:
    """Fill in the model and the limit of generated tokens.

    Args:
        protocol: Name of the protocol adapter.
        default_max_tokens: gateway.default_max_tokens.

    Returns:
        `request` itself when nothing is missing.

    Raises:
        BadRequest: The body cannot be serialized again.
    """
    if request.model == OWN_MODEL and protocol in MODEL_OPTIONAL:
        payload = {name: value for name, value in request.payload.items() if name != "model"}
        request = replace(request, model=None, payload=payload, body=dumps(payload))
    names = REPLY_FIELDS.get(protocol)
    if (
        default_max_tokens is None
        or names is None
        or any(request.payload.get(name) is not None for name in names)
    ):
        return request
    added = {names[0]: default_max_tokens}
    return replace(request, body=with_fields(request, added), payload={**request.payload, **added})

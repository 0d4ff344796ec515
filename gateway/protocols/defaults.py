"""What a model call means where it leaves something to the installation: the engine's own model, the bound of a reply. Pure.

The record keeps the client's own bytes; only what the engine is asked is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.protocols.base import Request
from gateway.protocols.request_fields import dumps, with_fields

OWN_MODEL = "default"
"""Claw-R1's agents ask for this one: whatever the engine serves."""
MODEL_OPTIONAL = ("openai.chat", "openai.completions")
REPLY_FIELDS: Mapping[str, tuple[str, ...]] = {
    "openai.chat": ("max_tokens", "max_completion_tokens"),
    "openai.completions": ("max_tokens",),
    "openai.responses": ("max_output_tokens",),
}
"""By protocol: the field for the bound of a reply, then its other names. Messages always name one."""


def with_defaults(request: Request, protocol: str, default_max_tokens: int | None) -> Request:
    """The call as it is meant. protocol: name. Where it leaves nothing open its own bytes stay as they are. Raises BadRequest."""
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

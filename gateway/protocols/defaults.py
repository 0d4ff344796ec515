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
"""By dialect: the field for the bound of a reply, then its other names. Messages always name one."""


def with_defaults(request: Request, dialect: str, default_max_tokens: int | None) -> Request:
    """The call as it is meant. dialect: name. Where it leaves nothing open its own bytes stay as they are. Raises BadRequest."""
    if request.model == OWN_MODEL and dialect in MODEL_OPTIONAL:
        said = {name: value for name, value in request.said.items() if name != "model"}
        request = replace(request, model=None, said=said, body=dumps(said))
    names = REPLY_FIELDS.get(dialect)
    if (
        default_max_tokens is None
        or names is None
        or any(request.said.get(name) is not None for name in names)
    ):
        return request
    added = {names[0]: default_max_tokens}
    return replace(request, body=with_fields(request, added), said={**request.said, **added})

"""Reads sampling parameters from a request, for engines that do not report them. Pure.

The defaults of the model and of the engine are unknown. Invalid values are ignored; no request
causes an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawstream.schemas.records import Sampling

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Constraints in vLLM's `structured_outputs`."""
FORMATS = ("json_object", "json_schema", "structural_tag")
"""Constraining types of an output format.

The format is `response_format` (chat, completions), `text.format` (responses) or `output_format`
(messages).
"""
LIMITING = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens")
CONSTRAINING = frozenset(
    {"response_format", "text", "output_format", "structured_outputs", "tool_choice", *LIMITING}
)
"""Fields of a request that can constrain the output. Most requests have none of them."""


def requested_sampling(payload: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters in a request of any protocol."""
    numbers: dict[str, Any] = {
        name: float(payload[name])
        for name in NUMBERS
        if name in payload and _is_number(payload[name])
    }
    top_k = payload.get("top_k")
    return Sampling(
        source="request",
        **numbers,
        top_k=max(top_k, 0) if type(top_k) is int and top_k < 1 << 31 else None,
        constraints=() if CONSTRAINING.isdisjoint(payload) else tuple(_constraints(payload)),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _constraints(payload: Mapping[str, Any]) -> list[str]:
    text, structured = _object(payload.get("text")), _object(payload.get("structured_outputs"))
    formats = [
        _object(f).get("type")
        for f in (payload.get("response_format"), text.get("format"), payload.get("output_format"))
    ]
    found = [kind for kind in FORMATS if kind in formats]
    found += [name for name in STRUCTURED if structured.get(name) is not None and name not in found]
    choice = payload.get("tool_choice")
    kind = _object(choice).get("type", choice)
    if choice is not None and kind not in ("auto", "none"):
        found.append(
            "tool_choice"
        )  # the reply must be a tool call: the engine enforces its grammar
    return [*found, *(name for name in LIMITING if payload.get(name))]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}

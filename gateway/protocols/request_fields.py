"""Reads and changes request fields that several protocols share. Pure.

Every error names the field.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from clawstream.gateway.errors import BadRequest, Unprocessable
from clawstream.gateway.protocols.base import Request

MAX_N = 128
MAX_CHOICES = 1024
"""Maximum number of steps of one call."""
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
MAX_MODEL = 200
"""Maximum characters of a model name: names are kept in records, routes and metrics."""
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
LONE = tuple(
    re.compile(pattern)
    for pattern in (_HIGH + rb"(?!%b)" % _LOW, _LOW + rb"(?<!%b%b)" % (_HIGH, _LOW))
)
"""An escaped surrogate without its second half, and without its first one."""


def dumps(
    value: Any,
    field: str = "body",
    error: type[BadRequest | Unprocessable] = BadRequest,
    *,
    sort: bool = False,
) -> bytes:
    """Serialize a value of a client's request as JSON.

    Args:
        sort: Sort the keys (canonical form).

    Raises:
        error: The value cannot be serialized: more than 254 levels, a number above 64 bits, or a
            lone surrogate. The message names the field and never contains values.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)
    except orjson.JSONEncodeError as cause:
        raise error(
            f"{field}: nested too deeply or holds a value JSON cannot write", field
        ) from cause


def repaired(body: bytes) -> bytes:
    """Remove a byte order mark from JSON, and replace lone surrogates with U+FFFD.

    Clients that truncate a text in the middle of an emoji send lone surrogates.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if b"\0" in body:  # no JSON
        return body
    # An escaped backslash begins no escape. The replacement needs no call for each escape, which
    # would take seconds for a large body.
    hidden = body.replace(rb"\\", b"\0\0")
    for lone in LONE:
        hidden = lone.sub(rb"\\ufffd", hidden)
    return hidden.replace(b"\0\0", rb"\\")


def object_of(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request. Raises BadRequest."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"body: not JSON: {error}", "body") from error
    if not isinstance(payload, dict):
        raise BadRequest("body: must be a JSON object", "body")
    return payload


def model_of(payload: dict[str, Any]) -> str | None:
    """Return the requested model. Raises BadRequest."""
    model = payload.get("model")
    if not (model is None or isinstance(model, str)):
        raise BadRequest("model: must be a string", "model")
    if model is not None and len(model) > MAX_MODEL:
        raise BadRequest(f"model: longer than {MAX_MODEL} characters", "model")
    return model


def check_messages(payload: dict[str, Any]) -> None:
    """Raise BadRequest unless the request has a list of messages."""
    messages = payload.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages: must be a list of message objects", "messages")


def stream_of(payload: dict[str, Any]) -> bool:
    """Tell whether the client requests a streamed reply. Raises BadRequest."""
    stream = payload.get("stream")
    if not (stream is None or isinstance(stream, bool)):
        raise BadRequest("stream: must be true or false", "stream")
    return bool(stream)


def n_of(payload: dict[str, Any]) -> int:
    """Return the requested number of choices. Raises BadRequest."""
    n = payload.get("n")
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N:
        raise BadRequest(f"n: must be a whole number from 1 to {MAX_N}", "n")
    return n


def with_fields(request: Request, added: dict[str, Any]) -> bytes:
    """Add fields to the body; keeps the client's bytes when none of the fields is present.

    Raises:
        BadRequest: The body cannot be serialized again.
    """
    if not added:
        return request.body
    if added.keys() & request.payload.keys() or not request.payload:
        return dumps({**request.payload, **added})
    return request.body.rstrip(b" \t\r\n")[:-1] + b"," + orjson.dumps(added)[1:]


def with_defaults(request: Request, protocol: str, default_max_tokens: int | None) -> Request:
    """Fill in the model and the limit of generated tokens.

    Only the request to the engine changes. The recorded request keeps the client's bytes.

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
        request = request._replace(model=None, payload=payload, body=dumps(payload))
    names = REPLY_FIELDS.get(protocol)
    if (
        default_max_tokens is None
        or names is None
        or any(request.payload.get(name) is not None for name in names)
    ):
        return request
    added = {names[0]: default_max_tokens}
    return request._replace(body=with_fields(request, added), payload={**request.payload, **added})


def renamed(body: bytes, model: str) -> bytes:
    """Replace the model in the body. Raises BadRequest.

    Uses the standard library's JSON, which keeps integers of any length.
    """
    try:
        payload = json.loads(body)
        if not isinstance(payload, dict):
            return body
        return json.dumps(
            payload | {"model": model}, ensure_ascii=False, separators=(",", ":")
        ).encode()
    except ValueError:
        return body  # the engine reports the error
    except RecursionError as error:
        raise BadRequest("body: nested too deeply", "body") from error

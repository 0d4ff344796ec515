"""What all protocols have in their requests: read, and changed in the bytes. Pure; every error names the field."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from gateway.errors import BadRequest, Unprocessable
from gateway.protocols.base import Request

MAX_N = 128
ESCAPES = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""In JSON: a surrogate pair, half of one, any other escape."""


def dumps(
    value: Any,
    field: str = "body",
    error: type[BadRequest | Unprocessable] = BadRequest,
    *,
    sort: bool = False,
) -> bytes:
    """A value that a client sent, as JSON. sort: canonical.

    Raises `error` that names the field for what can be read but not written: more than 254 levels, a number above 64 bits, half a surrogate
    pair. The values stand in no message.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)
    except orjson.JSONEncodeError as cause:
        raise error(
            f"{field}: nested too deeply or holds a value JSON cannot write", field
        ) from cause


def with_whole_characters(body: bytes) -> bytes:
    """JSON in which each half of a surrogate pair is U+FFFD. Clients that cut a text between the halves of an emoji send such halves."""
    return ESCAPES.sub(lambda found: rb"\ufffd" if found[2] is not None else found[0], body)


def object_of(body: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises BadRequest."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"body: not JSON: {error}", "body") from error
    if not isinstance(payload, dict):
        raise BadRequest("body: must be a JSON object", "body")
    return payload


def model_of(payload: dict[str, Any]) -> str | None:
    """The model that is asked for. Raises BadRequest."""
    model = payload.get("model")
    if not (model is None or isinstance(model, str)):
        raise BadRequest("model: must be a string", "model")
    return model


def check_messages(payload: dict[str, Any]) -> None:
    """Raises BadRequest unless the request has a list of messages."""
    messages = payload.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages: must be a list of message objects", "messages")


def stream_of(payload: dict[str, Any]) -> bool:
    """Whether the reply is to be streamed. Raises BadRequest."""
    stream = payload.get("stream")
    if not (stream is None or isinstance(stream, bool)):
        raise BadRequest("stream: must be true or false", "stream")
    return bool(stream)


def n_of(payload: dict[str, Any]) -> int:
    """How many choices are asked for. Raises BadRequest."""
    n = payload.get("n")
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N:
        raise BadRequest(f"n: must be a whole number from 1 to {MAX_N}", "n")
    return n


def with_fields(request: Request, added: dict[str, Any]) -> bytes:
    """The body with fields added. Where none of them was there before, the client's own bytes stay as they are.

    Raises BadRequest.
    """
    if not added:
        return request.body
    if added.keys() & request.payload.keys() or not request.payload:
        return dumps({**request.payload, **added})
    return request.body.rstrip(b" \t\r\n")[:-1] + b"," + orjson.dumps(added)[1:]


def renamed(body: bytes, model: str) -> bytes:
    """The body with another model. Not by `dumps`: numbers of any length stay what they are. Raises BadRequest."""
    try:
        payload = json.loads(body)
        if not isinstance(payload, dict):
            return body
        return json.dumps(
            payload | {"model": model}, ensure_ascii=False, separators=(",", ":")
        ).encode()
    except ValueError:
        return body  # the engine says what is wrong with it
    except RecursionError as error:
        raise BadRequest("body: nested too deeply", "body") from error


def error_text(error: object) -> str:
    """What an engine's error object says."""
    return str(error.get("message")) if isinstance(error, dict) else str(error)

"""The one place where errors become HTTP replies, in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from gateway import errors as e


class _Kind(NamedTuple):
    status: int
    type: str
    code: str
    retry_after_s: int | None = None


_KINDS: dict[type[e.GatewayError], _Kind] = {
    e.BadRequest: _Kind(400, "invalid_request_error", "invalid_request"),
    e.WrongKey: _Kind(401, "authentication_error", "invalid_api_key"),
    e.NotFound: _Kind(404, "invalid_request_error", "not_found"),
    e.WrongMethod: _Kind(405, "invalid_request_error", "method_not_allowed"),
    e.BodyTooLarge: _Kind(413, "invalid_request_error", "request_too_large"),
    e.Unprocessable: _Kind(422, "invalid_request_error", "invalid_value"),
    e.RecordTooLarge: _Kind(500, "server_error", "record_too_large"),
    e.UpstreamFailed: _Kind(502, "server_error", "upstream_failed"),
    e.Overloaded: _Kind(503, "server_error", "overloaded", 1),
    e.NoWorker: _Kind(503, "server_error", "no_worker", 2),
    e.NoRoom: _Kind(503, "server_error", "spool_full", 5),
    e.NotRecorded: _Kind(503, "server_error", "not_recorded", 2),
    e.UpstreamTimeout: _Kind(504, "server_error", "upstream_timeout"),
    e.GatewayError: _Kind(500, "server_error", "internal_error"),
}

JSON = b"application/json"


class Reply(NamedTuple):
    """A whole HTTP reply; header names in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def _kind_of(error: e.GatewayError) -> _Kind:
    return next(_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS)


def body_of(error: e.GatewayError) -> bytes:
    """The error as OpenAI writes it, JSON."""
    kind = _kind_of(error)
    return orjson.dumps(
        {"error": {"message": error.message, "type": kind.type, "param": error.param, "code": kind.code}}
    )


def reply_of(error: e.GatewayError) -> Reply:
    """The whole reply: status, Retry-After where trying again can help, body."""
    kind, body = _kind_of(error), body_of(error)
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
    if kind.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % kind.retry_after_s))
    return Reply(kind.status, headers, body)


def event_of(error: e.GatewayError) -> bytes:
    """The error as a server-sent event, for a stream that has begun."""
    return b"data: " + body_of(error) + b"\n\n"

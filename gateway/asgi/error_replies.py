"""The one place where errors become HTTP replies. The status is of the error, the body in the shape of the protocol that was spoken."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import orjson

from gateway import errors as e


class HttpError(NamedTuple):
    """What an error is to a client. type, code: OpenAI's words."""

    status: int
    type: str
    code: str
    retry_after_s: int | None = None


_HTTP_ERRORS: dict[type[e.GatewayError], HttpError] = {
    e.BadRequest: HttpError(400, "invalid_request_error", "invalid_request"),
    e.WrongKey: HttpError(401, "authentication_error", "invalid_api_key"),
    e.Forbidden: HttpError(403, "permission_error", "insufficient_scope"),
    e.NotFound: HttpError(404, "invalid_request_error", "not_found"),
    e.WrongMethod: HttpError(405, "invalid_request_error", "method_not_allowed"),
    e.TooSlow: HttpError(408, "invalid_request_error", "request_timeout"),
    e.BodyTooLarge: HttpError(413, "invalid_request_error", "request_too_large"),
    e.WrongEncoding: HttpError(415, "invalid_request_error", "unsupported_content_encoding"),
    e.Unprocessable: HttpError(422, "invalid_request_error", "invalid_value"),
    e.KeyLimited: HttpError(429, "rate_limit_error", "rate_limit_exceeded"),
    e.HeadersTooLarge: HttpError(431, "invalid_request_error", "headers_too_large"),
    e.RecordTooLarge: HttpError(500, "server_error", "record_too_large"),
    e.NoWebSocket: HttpError(426, "invalid_request_error", "no_websocket"),
    e.UpstreamFailed: HttpError(502, "server_error", "upstream_failed"),
    e.Overloaded: HttpError(503, "server_error", "overloaded", 1),
    e.DemandUnknown: HttpError(503, "server_error", "demand_unknown", 1),
    e.NotConfigured: HttpError(503, "server_error", "not_configured"),
    e.NoWorker: HttpError(503, "server_error", "no_worker", 2),
    e.NoRoom: HttpError(503, "server_error", "spool_full", 5),
    e.NotRecorded: HttpError(503, "server_error", "not_recorded", 2),
    e.UpstreamTimeout: HttpError(504, "server_error", "upstream_timeout"),
    e.GatewayError: HttpError(500, "server_error", "internal_error"),
}

JSON = b"application/json"


class Reply(NamedTuple):
    """A whole HTTP reply; header names in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def http_error_of(error: e.GatewayError) -> HttpError:
    """Status, type, code and Retry-After of an error."""
    return next(_HTTP_ERRORS[cls] for cls in type(error).__mro__ if cls in _HTTP_ERRORS)


class ErrorFormat(Protocol):
    """How a protocol writes errors."""

    def body(self, error: e.GatewayError) -> bytes:
        """JSON body of an error reply."""
        ...

    def engine_error(self, status: int, body: bytes) -> bytes:
        """An engine's own error as this protocol writes it."""
        ...


class OpenAIErrors:
    """`{"error": {message, type, param, code}}`, which is vLLM's own."""

    def body(self, error: e.GatewayError) -> bytes:
        kind = http_error_of(error)
        return orjson.dumps(
            {
                "error": {
                    "message": error.message,
                    "type": kind.type,
                    "param": error.param,
                    "code": kind.code,
                }
            }
        )

    def engine_error(self, status: int, body: bytes) -> bytes:
        return body


OPENAI_ERRORS = OpenAIErrors()


def reply_of(error: e.GatewayError, errors: ErrorFormat = OPENAI_ERRORS) -> Reply:
    """The whole reply: status, Retry-After where trying again can help, body."""
    kind, body = http_error_of(error), errors.body(error)
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
    retry_after_s = error.retry_after_s if isinstance(error, e.KeyLimited) else kind.retry_after_s
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    return Reply(kind.status, headers, body)


def outcome_of(error: e.GatewayError) -> str:
    """How a call has ended that raised this, see Metrics.calls."""
    match error:
        case e.NotRecorded():
            return "not_recorded"
        case e.UpstreamFailed() | e.UpstreamTimeout():
            return "upstream_error"
        case _:
            return "refused"

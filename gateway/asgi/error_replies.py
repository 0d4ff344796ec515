"""Maps errors to HTTP replies, for the whole gateway.

The error gives the status, the protocol of the call the format of the body.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import orjson

from clawstream.gateway import errors as e


class HttpError(NamedTuple):
    """HTTP mapping of an error. type, code: values of OpenAI's error object."""

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
    e.WrongTransfer: HttpError(501, "invalid_request_error", "unsupported_transfer_encoding"),
    e.UpstreamFailed: HttpError(502, "server_error", "upstream_failed"),
    e.Overloaded: HttpError(503, "server_error", "overloaded", 1),
    e.BudgetUnknown: HttpError(503, "server_error", "budget_unknown", 1),
    e.NotConfigured: HttpError(503, "server_error", "not_configured"),
    e.NoEngine: HttpError(503, "server_error", "no_engine", 2),
    e.NoRoom: HttpError(503, "server_error", "spool_full", 5),
    e.NotRecorded: HttpError(503, "server_error", "not_recorded", 2),
    e.UpstreamTimeout: HttpError(504, "server_error", "upstream_timeout"),
    e.WrongVersion: HttpError(505, "invalid_request_error", "unsupported_http_version"),
    e.GatewayError: HttpError(500, "server_error", "internal_error"),
}

JSON = b"application/json"


class Reply(NamedTuple):
    """A complete HTTP reply; header names in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def json_reply(value: object) -> Reply:
    """Build a reply of status 200 with a JSON body."""
    body = orjson.dumps(value)
    return Reply(200, [(b"content-type", JSON), (b"content-length", b"%d" % len(body))], body)


def http_error_of(error: e.GatewayError) -> HttpError:
    """Return the HTTP mapping of an error."""
    return next(_HTTP_ERRORS[cls] for cls in type(error).__mro__ if cls in _HTTP_ERRORS)


class ErrorFormat(Protocol):
    """Error format of a protocol."""

    def body(self, error: e.GatewayError) -> bytes:
        """Format an error as the JSON body of a reply."""
        ...

    def engine_error(self, status: int, body: bytes) -> bytes:
        """Convert an engine's error body to this format."""
        ...


class OpenAIErrors:
    """Formats errors as `{"error": {message, type, param, code}}`, the format of vLLM."""

    def body(self, error: e.GatewayError) -> bytes:
        http = http_error_of(error)
        return orjson.dumps(
            {
                "error": {
                    "message": error.message,
                    "type": http.type,
                    "param": error.param,
                    "code": http.code,
                }
            }
        )

    def engine_error(self, status: int, body: bytes) -> bytes:
        return body


OPENAI_ERRORS = OpenAIErrors()


def reply_of(error: e.GatewayError, errors: ErrorFormat = OPENAI_ERRORS) -> Reply:
    """Build the reply of an error, with Retry-After where a retry can help."""
    http, body = http_error_of(error), errors.body(error)
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
    retry_after_s = error.retry_after_s if isinstance(error, e.KeyLimited) else http.retry_after_s
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    return Reply(http.status, headers, body)


def outcome_of(error: e.GatewayError) -> str:
    """Return the outcome of a call that raised this error, see Metrics.calls."""
    match error:
        case e.NotRecorded():
            return "not_recorded"
        case e.UpstreamFailed() | e.UpstreamTimeout():
            return "upstream_error"
        case _:
            return "refused"

"""Errors of the gateway.

The message states what happened and what to do. `asgi.error_replies` maps errors to HTTP.
"""

from __future__ import annotations

from clawstream.runtime.errors import InUse, PlumbingError
from clawstream.schemas.errors import ForeseenError, SettingsError


class GatewayError(ForeseenError):
    """Root of all gateway errors. param: The invalid field or header, if any."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(GatewayError):
    """The request violates the protocol. Names the field."""


class Unprocessable(GatewayError):
    """A well-formed request has an invalid value. Names the field."""


class WrongKey(GatewayError):
    """The API key is missing or unknown."""


class Forbidden(GatewayError):
    """The API key lacks a scope, or a page of another site calls. Names the scope or origin."""


class KeysUnreadable(GatewayError):
    """The file of API keys cannot be read or written."""


class KeyTaken(GatewayError):
    """An API key with this name exists."""


class NoSuchKey(GatewayError):
    """No API key has this name or id."""


class NotFound(GatewayError):
    """No such path, or no such run."""


class BudgetUnknown(GatewayError):
    """The rollout budget of a run is not known yet. Try again."""


class WrongMethod(GatewayError):
    """The path exists, but not for this method."""


class NoWebSocket(GatewayError):
    """The client requested a WebSocket. Codex falls back to HTTP at this status."""


class TooSlow(GatewayError):
    """The request did not arrive in time."""


class HeadersTooLarge(GatewayError):
    """The request line and headers are too large."""


class WrongEncoding(GatewayError):
    """The content-encoding of the request body is not supported."""


class WrongTransfer(GatewayError):
    """The transfer-encoding of the request is not supported."""


class WrongVersion(GatewayError):
    """The HTTP version of the request is not supported."""


class KeyLimited(GatewayError):
    """An API key has reached a rate limit. retry_after_s: Seconds until the next call."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BodyTooLarge(GatewayError):
    """The request body exceeds gateway.max_body_bytes."""


class Overloaded(GatewayError):
    """A limit of calls or bytes in flight is reached. Nothing was sampled; try again."""


class NotConfigured(GatewayError):
    """The request needs a setting that is missing. Names the setting."""


class NoEngine(GatewayError):
    """No engine became ready within gateway.worker_wait_s. Nothing was sampled; try again."""


class NoRoom(GatewayError):
    """Kafka is unreachable and the spool has no room. Nothing was sampled; try again."""


class UpstreamFailed(GatewayError):
    """The engine disconnected or sent an invalid reply."""


class Unreachable(UpstreamFailed):
    """No connection to an engine was possible; nothing was sent."""


class UpstreamTimeout(GatewayError):
    """The engine exceeded gateway.upstream_timeout_s or gateway.upstream_total_timeout_s."""


class KafkaUnavailable(GatewayError):
    """Kafka did not acknowledge in time; the outcome is unknown. Retry with the same ids."""


class BlobsUnavailable(GatewayError):
    """The blob store stored no large field, see gateway.blob_uri. The spool keeps the record."""


class NotRecorded(GatewayError):
    """The record is neither on Kafka nor in the spool, so the call must fail."""


class SpoolFull(NotRecorded):
    """Kafka is unreachable and the spool is full: see gateway.spool_max_bytes and the disk."""


class SpoolFailed(NotRecorded, PlumbingError):
    """The disk under the spool refused to write."""


class RecordTooLarge(NotRecorded):
    """The record exceeds Kafka's message size."""


class RecordUnfit(NotRecorded):
    """The record cannot be read, so that its large fields and images cannot be moved."""


class SpoolTaken(GatewayError, InUse):
    """Another process uses this spool directory. Give every gateway its own gateway.gateway_id."""


class RedactionUnusable(GatewayError, SettingsError):
    """gateway.redaction names a missing rule or tokenizer."""


class UpstreamUnusable(GatewayError, SettingsError):
    """The API key of an engine in gateway.upstreams is missing or invalid in a header."""


class ClientGone(GatewayError):
    """The client closed its connection."""

"""What goes wrong in the gateway. The message says what happened and what to do; `error_reply` says which HTTP status it is."""

from __future__ import annotations

from runtime.errors import InUse, PlumbingError
from schemas.errors import ForeseenError, SettingsError


class GatewayError(ForeseenError):
    """Root of all errors of the gateway. param: the field or header that is wrong, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(GatewayError):
    """The request is not what the protocol says. Names the field."""


class Unprocessable(GatewayError):
    """A well-formed request with a value that cannot be. Names the field."""


class WrongKey(GatewayError):
    """No key where one is needed, or one that this installation does not know."""


class Forbidden(GatewayError):
    """The key is known, but may not do this. Names what it lacks."""


class KeysUnreadable(GatewayError):
    """The file of API keys cannot be read, or a key cannot be written to it."""


class KeyTaken(GatewayError):
    """An API key has this name already."""


class NoSuchKey(GatewayError):
    """No API key has this name or id."""


class NotFound(GatewayError):
    """No such path, or no such run."""


class DemandUnknown(GatewayError):
    """What a run asks for is not known yet: its journal is still being read, or cannot be. Try again."""


class WrongMethod(GatewayError):
    """The path is there, but not for this method."""


class NoWebSocket(GatewayError):
    """Model calls are HTTP requests, streamed by server-sent events. Codex asks for a WebSocket first, and at this status goes on without."""


class TooSlow(GatewayError):
    """The request did not come in time."""


class HeadersTooLarge(GatewayError):
    """The request's line and headers exceed a bound."""


class WrongEncoding(GatewayError):
    """The request's body is compressed in a way that is not decoded here."""


class KeyLimited(GatewayError):
    """An API key has used what it may for now. retry_after_s: when it may again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BodyTooLarge(GatewayError):
    """The request body exceeds gateway.max_body_bytes."""


class Overloaded(GatewayError):
    """More calls, or more bytes of calls, are in flight than gateway.max_in_flight or max_in_flight_bytes. Nothing was sampled; try again."""


class NotConfigured(GatewayError):
    """The installation has no setting for what is asked. Names the setting."""


class NoWorker(GatewayError):
    """No engine became ready within gateway.worker_wait_s. Nothing was sampled; try again."""


class NoRoom(GatewayError):
    """Kafka is away and the spool could not take what a call would give. Nothing was sampled; try again."""


class UpstreamFailed(GatewayError):
    """The engine went away or answered something that is no reply."""


class Unreachable(UpstreamFailed):
    """No connection to an engine could be made: nothing was sent."""


class UpstreamTimeout(GatewayError):
    """The engine sent nothing for gateway.upstream_timeout_s, or took longer than gateway.upstream_total_timeout_s."""


class BusUnavailable(GatewayError):
    """Kafka did not acknowledge in time. Nothing is known of what was sent; retry with the same ids."""


class BlobsUnavailable(GatewayError):
    """The blob store took no large field, see gateway.blob_uri. The record waits whole in the spool."""


class NotRecorded(GatewayError):
    """The record is neither on Kafka nor in the spool, so it may not be answered."""


class SpoolFull(NotRecorded):
    """Kafka is away and the spool has no room: see gateway.spool_max_bytes, and the free space of its disk."""


class SpoolFailed(NotRecorded, PlumbingError):
    """The disk under the spool refused to write."""


class RecordTooLarge(NotRecorded):
    """The record is larger than Kafka takes."""


class SpoolTaken(GatewayError, InUse):
    """Another process uses this spool directory. Give every gateway its own gateway.gateway_id."""


class RedactionUnusable(GatewayError, SettingsError):
    """gateway.redaction names a rule or a tokenizer that is not there."""


class UpstreamUnusable(GatewayError, SettingsError):
    """gateway.upstreams names an engine that can't be called: its key is missing or no header can hold it."""


class ClientGone(GatewayError):
    """The client closed its connection: there is nobody to answer."""

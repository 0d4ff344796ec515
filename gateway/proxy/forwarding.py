"""Headers, credentials and URL queries forwarded between client and engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_plus

from clawstream.gateway.auth.session_keys import KEY_PREFIXES
from clawstream.gateway.capture.steps import Call, traceparent_of
from clawstream.gateway.engines.client import EngineCall
from clawstream.schemas.ids import TraceContext, call_span_id, own_trace_id, parse_traceparent
from clawstream.schemas.settings import GatewaySettings

FORWARDED = frozenset({
    "traceparent", "tracestate", "x-request-id", "x-client-request-id", "x-session-id",
    "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access",
    "openai-beta", "openai-organization", "openai-project", "x-goog-user-project", "http-referer",
    "x-title", "x-codex-turn-state", "originator", "version",
})  # fmt: skip
"""Client headers forwarded to an engine. The client's API key belongs to the gateway."""
RETURNED = frozenset({
    b"retry-after", b"retry-after-ms", b"x-should-retry", b"request-id", b"x-request-id",
    b"apim-request-id",
})  # fmt: skip
RETURNED_PREFIXES = (
    b"x-ratelimit-", b"ratelimit", b"anthropic-", b"openai-", b"x-ms-", b"x-codex-",
)  # fmt: skip
"""Prefixes of engine headers returned to the client: rate limits, request ids, routes."""


@dataclass(frozen=True, slots=True)
class PassedHeaders:
    """Names of the headers that pass: from clients to engines, and from engines to clients."""

    forwarded: frozenset[str] = FORWARDED
    returned: frozenset[bytes] = RETURNED

    @classmethod
    def of(cls, settings: GatewaySettings) -> PassedHeaders:
        """Return the built-in names, and those of the settings."""
        return cls(
            FORWARDED | set(settings.forward_headers),
            RETURNED | {name.encode() for name in settings.return_headers},
        )


BUILT_IN = PassedHeaders()


def forwarded(
    headers: Mapping[str, str], has_body: bool, passed: PassedHeaders = BUILT_IN
) -> dict[str, str]:
    """Return the client's headers for the engine. headers: Names in lower case.

    A `tracestate` belongs to the `traceparent` beside it: without a valid one both are dropped.
    """
    kept = {name: value for name, value in headers.items() if name in passed.forwarded}
    if ("traceparent" in kept or "tracestate" in kept) and traceparent_of(headers) is None:
        kept.pop("traceparent", None)
        kept.pop("tracestate", None)
    if has_body:
        kept["content-type"] = "application/json"
    return kept


def returned(
    headers: Mapping[bytes, bytes], passed: PassedHeaders = BUILT_IN
) -> list[tuple[bytes, bytes]]:
    """Return the engine's headers for the client. headers: Names in lower case."""
    names = passed.returned
    return [(n, v) for n, v in headers.items() if n in names or n.startswith(RETURNED_PREFIXES)]


def content_headers(
    reply: EngineCall, passed: PassedHeaders, default: bytes | None = None
) -> list[tuple[bytes, bytes]]:
    """Return the engine's headers for a client that gets the body that was read.

    default: Content type if the engine names none.
    """
    headers = returned(reply.headers, passed)
    kind = reply.headers.get(b"content-type") or default
    if kind is not None:
        headers.append((b"content-type", kind))
    if reply.encoding is not None:
        headers.append((b"content-encoding", reply.encoding.encode("latin-1")))
    return headers


def with_query(path: str, query: bytes) -> str:
    """Append the client's query to an engine's path, without API keys of this gateway."""
    if not query:
        return path
    fields = query.decode("latin-1").split("&")
    kept = "&".join(
        f for f in fields if not unquote_plus(f.partition("=")[2]).startswith(KEY_PREFIXES)
    )
    return f"{path}?{kept}" if kept else path


def engine_traceparent(call: Call) -> str:
    """Return the trace context for an engine: the gateway's span of the call is the parent.

    A call without a trace context gets a trace of its own.
    """
    call_id = call.call_id or ""
    client, span_id = parse_traceparent(call.traceparent), call_span_id(call_id)
    if client is not None:
        return TraceContext(client.trace_id, span_id, client.flags).header
    trajectory = call.trajectory
    trace_id = own_trace_id(trajectory.run_id, trajectory.trajectory_key, call_id)
    return TraceContext(trace_id, span_id).header

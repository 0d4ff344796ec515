"""What passes between a client and an engine beside the bodies: headers, credentials, the query of a URL. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_plus

from gateway.attribution.sessions import OURS

FORWARDED = frozenset({
    "traceparent", "tracestate", "x-request-id", "x-client-request-id", "x-session-id",
    "x-vllm-priority",
    "x-data-parallel-rank", "anthropic-version", "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    "openai-beta", "openai-organization", "openai-project", "x-goog-user-project", "http-referer",
    "x-title",
})  # fmt: skip
"""Client's headers that mean something to an engine. Its credentials are ours, not the engine's."""
CREDENTIALS = ("authorization", "x-api-key")
"""Sent on only where gateway.upstreams says so."""
RETURNED = frozenset({
    b"retry-after", b"retry-after-ms", b"x-should-retry", b"request-id", b"x-request-id",
    b"apim-request-id",
})  # fmt: skip
RETURNED_PREFIXES = (b"x-ratelimit-", b"ratelimit", b"anthropic-", b"openai-", b"x-ms-")
"""An engine's headers that clients act upon or report: pauses, limits, the names of requests."""


def credentials_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's keys, for an upstream with `forward_credentials`."""
    return {name: headers[name] for name in CREDENTIALS if name in headers}


def returned(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The headers of an engine's reply that the client gets. headers: names in lower case."""
    return [(n, v) for n, v in headers.items() if n in RETURNED or n.startswith(RETURNED_PREFIXES)]


def with_query(path: str, query: bytes) -> str:
    """An engine's path with the client's query. A parameter that holds a key of this gateway is left out."""
    if not query:
        return path
    fields = query.decode("latin-1").split("&")
    kept = "&".join(f for f in fields if not unquote_plus(f.partition("=")[2]).startswith(OURS))
    return f"{path}?{kept}" if kept else path

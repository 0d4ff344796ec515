"""Builds the heads of HTTP requests to one engine; caches the part that requests share."""

from __future__ import annotations

from collections.abc import Mapping

from clawstream.gateway.auth.session_keys import KEY_PREFIXES
from clawstream.gateway.engines.http1 import Address
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.errors import BadRequest
from clawstream.schemas import engine_frames

CREDENTIALS = ("authorization", "x-api-key")
"""Headers of a client that go only to upstreams with `forward_credentials`."""
MAX_CACHED = 256
VERSION_PATH = "/version"
"""Path that shows the kind of an engine, with or without a header of our middleware."""


class RequestHeads:
    """The request heads of an engine. Holds for the kind in `spec`."""

    def __init__(self, spec: EngineSpec, address: Address) -> None:
        self._spec, self._address = spec, address
        self._cached: dict[tuple[str, str], tuple[str, str]] = {}

    def build(
        self, method: str, path: str, headers: Mapping[str, str], credentials: Mapping[str, str],
        length: int | None,
    ) -> bytes:  # fmt: skip
        """Build the head of a request, including the blank line.

        Args:
            method: HTTP method.
            path: Path as in the OpenAI API, with `/v1`; it may have a query.
            headers: Headers of the client that are relevant to an engine.
            credentials: Headers of the client with its API keys, see CREDENTIALS. The engine's own
                key takes precedence.
            length: Bytes of the body; None: no body.

        Raises:
            BadRequest: The path or a header has characters that a request cannot contain.
        """
        path, _, query = path.partition("?")
        line, rest = self._cached.get((method, path)) or self._shared(method, path)
        if query:
            line = f"{line}?{_target(query)}"
        fields = [f"{name}: {_clean(value)}\r\n" for name, value in headers.items()]
        if self._spec.forward_credentials and self._spec.api_key is None:
            keys = [(name, credentials[name]) for name in CREDENTIALS if name in credentials]
            fields += [f"{name}: {_clean(key)}\r\n" for name, key in keys if not _ours(key)]
        if length is not None:
            fields.append(f"content-length: {length}\r\n")
        return f"{line}{rest}{''.join(fields)}\r\n".encode("latin-1")

    def _shared(self, method: str, path: str) -> tuple[str, str]:
        """Build and cache the part that all requests of a method and path share."""
        spec = self._spec
        fields = [
            f"host: {self._address.header}", "accept: */*", "accept-encoding: identity",
            "user-agent: clawstream",
        ]  # fmt: skip
        if spec.kind == "captured" or path == VERSION_PATH:
            fields.append(f"{engine_frames.ASK}: 1")
        if spec.api_key is not None:
            anthropic = spec.kind == "text" and path.startswith("/v1/messages")
            name = spec.api_key_header or ("x-api-key" if anthropic else "authorization")
            fields.append(f"{name}: {'Bearer ' if name == 'authorization' else ''}{spec.api_key}")
        target = spec.api_root + path[3:] if path.startswith("/v1/") else path
        if len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        line = f"{method} {_target(self._address.prefix + target)}"
        shared = line, " HTTP/1.1\r\n" + "".join(f"{field}\r\n" for field in fields)
        self._cached[method, path] = shared
        return shared


def _target(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise BadRequest("path: characters that an engine's path cannot have", "path")
    return text


def _clean(text: str) -> str:
    if "\r" in text or "\n" in text or "\0" in text:
        raise BadRequest("headers: a line break or a null within a value")
    return text


def _ours(credential: str) -> bool:
    """Return whether a header value contains a key of this gateway, with or without a scheme."""
    return any(word.startswith(KEY_PREFIXES) for word in credential.split())

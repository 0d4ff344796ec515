"""Parses request paths of model calls. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

PROXY_PREFIXES = frozenset({
    "api", "openai", "anthropic", "azure", "claude", "v1", "v2", "beta", "proxy", "gateway", "llm",
    "llms", "engines",
    "deployments", "providers", "inference", "openrouter", "compatible-mode", "compat", "route",
    "backend", "services",
})  # fmt: skip
"""First path segments that proxies and providers use; they never name a trajectory."""
ITEMS = ("/models/",)
"""Path tails followed by an id, which may contain slashes."""
NAMED = ("/register_trajectory", "/complete_trajectory")
"""Path tails of control requests that name a trajectory."""


class CallTarget(NamedTuple):
    """A parsed path.

    tail: Path of the protocol, e.g. /chat/completions, without the item id. item: The id.
    """

    tail: str
    trajectory: str | None = None
    prompt: str | None = None
    item: str = ""


def parse_target(path: str, tails: Mapping[str, Sequence[str]]) -> CallTarget | None:
    """Parse the path of a model call or passthrough request; None for any other path.

    Args:
        path: See `canonical`.
        tails: Known tails by their last segment, longest first.
    """
    for tail in tails.get(path.rsplit("/", 1)[-1], ()):
        if path.endswith(tail):
            target = _before(path[: -len(tail)], tail)
            if target is not None:
                return target
            break  # /x/chat/completions is not /completions of a trajectory x
    for tail in ITEMS:
        before, found, item = path.partition(tail)
        item = unquote(item)
        if found and all(part not in ("", ".", "..") for part in item.split("/")):
            return _before(before, tail, item)
    return None


def _before(before: str, tail: str, item: str = "") -> CallTarget | None:
    before = before.removesuffix("/v1")
    if not before:
        return CallTarget(tail, item=item)
    match before.split("/"):
        case ["", trajectory, prompt] if trajectory and prompt:
            return CallTarget(tail, unquote(trajectory), unquote(prompt), item)
    return None


def canonical(raw_path: str) -> str:
    """Return a path of which only those characters are escaped that a segment cannot have.

    So a slash within an id does not end its segment.
    """
    if "%" not in raw_path:
        return raw_path
    segments = raw_path.split("/")
    return "/".join(quote(unquote(segment), safe="!$&'()*+,;=:@") for segment in segments)


def normalized(path: str) -> str:
    """Remove duplicate and trailing slashes and repeated /v1 segments."""
    path = re.sub(r"/{2,}", "/", path)
    return re.sub(r"(?:/v1)+(?=/v1(?:/|$))", "", path.rstrip("/") or "/")


def proxy_prefix(path: str, target: CallTarget | None) -> str | None:
    """Return the proxy prefix in the place of a trajectory id, or None."""
    if target is not None:
        first = target.trajectory
    else:
        first = path.split("/", 2)[1] if path.endswith(NAMED) and path.count("/") > 2 else None
    return first if first is not None and first.lower() in PROXY_PREFIXES else None


def how_to_call(base_path: str) -> str:
    """Describe valid base URLs, for an error message."""
    return (
        f"A base URL is http(s)://HOST:PORT{base_path}/v1, or "
        f"http(s)://HOST:PORT{base_path}/TRAJECTORY/PROMPT/v1 to name a trajectory. "
        "Set a common path prefix as gateway.base_path. The gateway speaks chat completions, "
        "completions, Responses and Messages, no other protocol that samples"
    )

"""Which path is a model call, and whose. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PROXY_PREFIXES = frozenset({
    "api", "openai", "anthropic", "azure", "claude", "v1", "v2", "beta", "proxy", "gateway", "llm",
    "llms", "engines",
    "deployments", "providers", "inference", "openrouter", "compatible-mode", "compat", "route",
    "backend", "services",
})  # fmt: skip
"""First segments that proxies and providers put before an API: such a path names no trajectory."""
ITEMS = ("/models/", "/responses/")
"""Behind these stands an id, which may have slashes itself."""
NAMED = ("/register_trajectory", "/complete_trajectory")
"""Control requests whose path names a trajectory."""


class CallTarget(NamedTuple):
    """A path taken apart. tail: the protocol's own path, e.g. /chat/completions; of an item up to its id. item: the id."""

    tail: str
    trajectory: str | None = None
    prompt: str | None = None
    item: str = ""


def parse_target(path: str, tails: Mapping[str, Sequence[str]]) -> CallTarget | None:
    """The call that a path is; None: it is none. tails: by their last segment, longer ones first."""
    for tail in tails.get(path.rsplit("/", 1)[-1], ()):
        if path.endswith(tail):
            target = _before(path[: -len(tail)], tail)
            if target is not None:
                return target
            break  # not the shorter one: /x/chat/completions is no completion of a trajectory x
    for tail in ITEMS:
        before, found, item = path.partition(tail)
        if found and all(part not in ("", ".", "..") for part in item.split("/")):
            return _before(before, tail, item)
    return None


def _before(before: str, tail: str, item: str = "") -> CallTarget | None:
    before = before.removesuffix("/v1")
    if not before:
        return CallTarget(tail, item=item)
    match before.split("/"):
        case ["", trajectory, prompt] if trajectory and prompt:
            return CallTarget(tail, trajectory, prompt, item)
    return None


def normalized(path: str) -> str:
    """The path as it was meant: no doubled or trailing slash, one /v1."""
    path = re.sub(r"/{2,}", "/", path)
    return re.sub(r"(?:/v1)+(?=/v1(?:/|$))", "", path.rstrip("/") or "/")


def proxy_prefix(path: str, target: CallTarget | None) -> str | None:
    """The proxy's prefix that stands where a trajectory should; None: none does."""
    if target is not None:
        first = target.trajectory
    else:
        first = path.split("/", 2)[1] if path.endswith(NAMED) and path.count("/") > 2 else None
    return first if first is not None and first.lower() in PROXY_PREFIXES else None


def how_to_call(base_path: str) -> str:
    """What base URLs look like, for a client that took another one."""
    return (
        f"A base URL is http(s)://HOST:PORT{base_path}/v1, or http(s)://HOST:PORT{base_path}/TRAJECTORY/PROMPT/v1 "
        "to name a trajectory. A path that stands before these is set as gateway.base_path"
    )

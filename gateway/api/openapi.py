"""Add the model calls to the OpenAPI page: they are served outside the web framework. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
CHOICES: Schema = {"type": "integer", "minimum": 1, "maximum": 128}
MESSAGES: Schema = {"type": "array", "items": {"type": "object"}}
REQUESTS: Mapping[str, tuple[list[str], Mapping[str, Schema]]] = {
    "/chat/completions": (["messages"], {"messages": MESSAGES, "n": CHOICES}),
    "/chat/completions/batch": (
        ["messages"],
        {"messages": {"type": "array", "items": MESSAGES}, "n": CHOICES},
    ),
    "/completions": (["prompt"], {"prompt": {}, "n": CHOICES}),
    "/responses": (["input"], {"input": {"type": ["string", "array"]}}),
    "/messages": (
        ["messages", "max_tokens"],
        {"messages": MESSAGES, "max_tokens": {"type": "integer", "minimum": 1}},
    ),
    "/messages/count_tokens": (["messages"], {"messages": MESSAGES}),
    "/responses/compact": (["input"], {"input": {"type": ["string", "array"]}}),
    "/responses/input_tokens": (["input"], {"input": {"type": ["string", "array"]}}),
    "/tokenize": ([], {"messages": MESSAGES, "prompt": TEXT}),
    "/detokenize": (["tokens"], {"tokens": {"type": "array", "items": {"type": "integer"}}}),
    "/embeddings": (["input"], {"input": {}}),
    "/moderations": (["input"], {"input": {}}),
    "/rerank": (["query", "documents"], {"query": {}, "documents": {"type": "array"}}),
}
"""Required fields and properties that the gateway itself reads, by path.

All other fields go to the engine unchanged.
"""
PREFIXES = ("", "/v1", "/{trajectory}/{prompt}", "/{trajectory}/{prompt}/v1")
JSON = "application/json"


def with_model_calls(page: dict[str, Any], tails: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the page with the model calls.

    Args:
        page: The OpenAPI page; changed in place.
        tails: Pairs of method and tail of the path.
    """
    for method, tail in tails:
        path = f"{tail}{{id}}" if tail.endswith("/") else tail
        for prefix in PREFIXES:
            page["paths"].setdefault(prefix + path, {})[method.lower()] = _operation(
                prefix, method, path
            )
    return page


def _operation(prefix: str, method: str, tail: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": f"{method} {tail}",
        "operationId": f"{method}{prefix}{tail}".replace("/", "_")
        .replace("{", "")
        .replace("}", ""),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in ("trajectory", "prompt", "id")
            if f"{{{name}}}" in prefix + tail
        ],
        "responses": {
            "200": {
                "description": "The engine's reply.",
                "content": {JSON: {}, "text/event-stream": {}},
            },
            "4XX": {
                "description": "What is wrong, in the protocol's own shape.",
                "content": {JSON: {}},
            },
            "5XX": {
                "description": "No engine, or nothing could be recorded; try again.",
                "content": {JSON: {}},
            },
        },
    }
    if tail in REQUESTS:
        required, properties = REQUESTS[tail]
        common: dict[str, Schema] = {"model": TEXT, "stream": {"type": "boolean"}}
        schema = {"type": "object", "required": required, "properties": common | dict(properties)}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation

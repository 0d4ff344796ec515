"""Texts to copy from a trajectory: a request for curl, a query, a test case. Pure."""

from __future__ import annotations

import shlex
from typing import Any

from clawstream.schemas.conversation import loaded

PATHS = {
    "openai.chat": "/v1/chat/completions",
    "openai.completions": "/v1/completions",
    "openai.responses": "/v1/responses",
    "anthropic.messages": "/v1/messages",
}


def curl_of(step: dict[str, Any], gateway_url: str) -> str:
    """Return a command that repeats the call of a step at the gateway.

    The body is a here-document: an argument can have 128 KiB at most.
    """
    end, body = "END_OF_REQUEST", step["request_json"]
    while end in body:  # nothing in a body may be run
        end += "_"
    url = gateway_url.rstrip("/") + PATHS.get(step["protocol"], PATHS["openai.chat"])
    return (
        f"curl {shlex.quote(url)} \\\n  -H 'content-type: application/json' \\\n"
        f"  -H \"authorization: Bearer $CLAWSTREAM_KEY\" \\\n  --data-binary @- <<'{end}'\n"
        f"{body}\n{end}"
    )


def sql_of(run_id: str, trajectory_id: str) -> str:
    """Return a command that selects the steps of a trajectory."""
    run, trajectory = (text.replace("'", "''") for text in (run_id, trajectory_id))
    query = (
        "SELECT step_index, request_json, response_json, trainable, untrainable_reason FROM steps "
        f"WHERE run_id = '{run}' AND trajectory_id = '{trajectory}' ORDER BY step_index"
    )
    return f"clawstream sql {shlex.quote(query)}"


def case_of(step: dict[str, Any], gateway_url: str) -> str | None:
    """Return a pytest module that repeats the call of a step and compares the tools it calls.

    None: the request or the reply is no JSON object, so there is nothing to repeat or compare.
    """
    if not all(_is_object(step[name]) for name in ("request_json", "response_json")):
        return None
    url = gateway_url.rstrip("/") + PATHS.get(step["protocol"], PATHS["openai.chat"])
    request, reply = repr(step["request_json"]), repr(step["response_json"])
    return f'''"""The recorded call, repeated: the reply calls the same tools."""

import json
import os

import httpx

STEP = {step["step_id"]!r}
URL = {url!r}
REQUEST = json.loads({request})
RECORDED = json.loads({reply})


def calls(value) -> list[str]:
    """Return the names of the tools that a reply calls, in order, of any protocol."""
    if isinstance(value, list):
        return [name for item in value for name in calls(item)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("function"), dict):  # Chat Completions
        return [value["function"]["name"]]
    if value.get("type") in ("tool_use", "function_call"):  # Messages, Responses
        return [value["name"]]
    inner = ("choices", "message", "tool_calls", "content", "output")
    return [name for field in inner for name in calls(value.get(field))]


def test_step() -> None:
    key = {{"authorization": "Bearer " + os.environ.get("CLAWSTREAM_KEY", "none")}}
    reply = httpx.post(URL, json=REQUEST | {{"stream": False}}, headers=key, timeout=300)
    reply.raise_for_status()
    assert calls(reply.json()) == calls(RECORDED)
'''


def _is_object(text: str) -> bool:
    try:
        return isinstance(loaded(text), dict)
    except ValueError:
        return False

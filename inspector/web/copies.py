"""Texts to copy from a trajectory: a request for curl, a query, a test case. Pure."""

from __future__ import annotations

import shlex
from typing import Any

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
    """Return a pytest module that repeats a chat completion and compares what the reply does."""
    url = gateway_url.rstrip("/") + PATHS["openai.chat"]
    if step["protocol"] != "openai.chat":
        return None
    request, reply = repr(step["request_json"]), repr(step["response_json"])
    return f'''"""Recorded as step {step["step_id"]}: the reply calls the same tools."""

import json
import os

import httpx

URL = {url!r}
REQUEST = json.loads({request})
RECORDED = json.loads({reply})


def calls(message: dict) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or ()]


def test_step() -> None:
    key = {{"authorization": "Bearer " + os.environ.get("CLAWSTREAM_KEY", "none")}}
    reply = httpx.post(URL, json=REQUEST | {{"stream": False}}, headers=key)
    reply.raise_for_status()
    message = reply.json()["choices"][0]["message"]
    assert calls(message) == calls(RECORDED)
    assert message.get("content") or calls(message)
'''

"""Texts to copy do what the recorded call did."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx
import pytest

from inspector.web.copies import case_of, curl_of

REQUEST = {"messages": [{"role": "user", "content": 'it\'s \U0001f600 `$HOME` \\n """\n'}]}
REPLY = {"role": "assistant", "content": "\U0001f600 yes"}


def step(**body: Any) -> dict[str, Any]:
    return {
        "step_id": "s", "protocol": "openai.chat", "response_json": json.dumps(REPLY),
        "request_json": json.dumps(REQUEST | body, ensure_ascii=False),
    }  # fmt: skip


def test_the_test_case_sends_the_recorded_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json={"choices": [{"message": REPLY}]})

    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "post", client.post)
    monkeypatch.setenv("CLAWSTREAM_KEY", "claw-k")
    module: dict[str, Any] = {}
    exec(case_of(step(), "http://gateway/") or "", module)
    module["test_step"]()
    assert json.loads(sent[0].content) == REQUEST | {"stream": False}
    assert sent[0].headers["authorization"] == "Bearer claw-k"
    assert str(sent[0].url) == "http://gateway/v1/chat/completions"


def test_the_command_of_a_long_request_runs() -> None:
    recorded = step(user="END_OF_REQUEST" + "x" * 200_000)
    script = "curl() { cat; }\n" + curl_of(recorded, "http://gateway")
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True)
    assert json.loads(done.stdout) == json.loads(recorded["request_json"])

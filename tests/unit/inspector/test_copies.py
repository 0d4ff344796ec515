"""Texts to copy do what the recorded call did."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx
import pytest

from clawstream.inspector.web.copies import case_of, curl_of

REQUEST = {"messages": [{"role": "user", "content": 'it\'s \U0001f600 `$HOME` \\n """\n'}]}
REPLY = {"role": "assistant", "content": "\U0001f600 yes"}


def step(**body: Any) -> dict[str, Any]:
    return {
        "step_id": "s", "protocol": "openai.chat", "response_json": json.dumps(REPLY),
        "request_json": json.dumps(REQUEST | body, ensure_ascii=False),
    }  # fmt: skip


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
BLOCKS = [{"type": "text", "text": "x"}, {"type": "tool_use", "name": "f", "input": {}}]
OUTPUT = [{"type": "function_call", "name": "f", "arguments": "{}"}]


@pytest.mark.parametrize(
    ("protocol", "path", "recorded", "replied", "other"),
    [
        ("openai.chat", "/v1/chat/completions", REPLY | {"tool_calls": [CALL]},
         {"choices": [{"message": REPLY | {"tool_calls": [CALL]}}]},
         {"choices": [{"message": REPLY}]}),
        ("anthropic.messages", "/v1/messages", {"content": BLOCKS}, {"content": BLOCKS},
         {"content": BLOCKS[:1]}),
        ("openai.responses", "/v1/responses", {"output": OUTPUT}, {"output": OUTPUT},
         {"output": OUTPUT * 2}),
    ],
)  # fmt: skip
def test_the_test_case_sends_the_recorded_request_and_compares_the_tools(
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    path: str,
    recorded: Any,
    replied: Any,
    other: Any,
) -> None:
    sent, replies = list[httpx.Request](), [other, replied]

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json=replies.pop())

    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "post", client.post)
    monkeypatch.setenv("CLAWSTREAM_KEY", "claw-k")
    module: dict[str, Any] = {}
    given = step() | {"protocol": protocol, "response_json": json.dumps(recorded)}
    exec(str(case_of(given, "http://gateway/")), module)
    module["test_step"]()
    assert json.loads(sent[0].content) == REQUEST | {"stream": False}
    assert sent[0].headers["authorization"] == "Bearer claw-k"
    assert str(sent[0].url) == "http://gateway" + path
    with pytest.raises(AssertionError):
        module["test_step"]()


@pytest.mark.parametrize("field", ["request_json", "response_json"])
@pytest.mark.parametrize("body", ["", "data: {", "[]"])
def test_a_body_that_nothing_understands_is_no_test_case(field: str, body: str) -> None:
    assert case_of(step() | {field: body}, "http://gateway/") is None


def test_no_recorded_text_is_code() -> None:
    hostile = '"""\nimport os; os.abort()\n"""'
    given = step() | {"step_id": hostile, "request_json": json.dumps({"a": hostile})}
    module: dict[str, Any] = {}
    exec(str(case_of(given, "http://gateway/")), module)
    assert (module["STEP"], module["REQUEST"]) == (hostile, {"a": hostile})


def test_the_command_of_a_long_request_runs() -> None:
    recorded = step(user="END_OF_REQUEST" + "x" * 200_000)
    script = "curl() { cat; }\n" + curl_of(recorded, "http://gateway")
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True)
    assert json.loads(done.stdout) == json.loads(recorded["request_json"])

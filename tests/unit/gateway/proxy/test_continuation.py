"""Exact continuation between a client and a scripted engine, in every protocol with turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.engine_frames import CONTINUE, PRIOR_FIELD, split_prior
from clawstream.schemas.records import Continuation, Step
from clawstream.schemas.tokens import unpack_ids

Json = dict[str, Any]
CODEC = Codec()
LOOK = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"key": "k1"}'},
}
CALLS = ScriptedChoice(
    [4, 5, 6], [None, None, None], [-0.1, -0.2, -0.3], tool_calls=[LOOK], finish_reason="tool_calls"
)
YES = ScriptedChoice([7, 8], ["Y", "es"], [-0.5, -0.25])
TOOLS: list[Json] = [{"type": "function", "function": {"name": "lookup"}}]
PATHS = {
    "openai.chat": "chat/completions",
    "openai.responses": "responses",
    "anthropic.messages": "messages",
}


def answers(request: Json) -> Script:
    """Call a tool for each question, else answer; keep the ids that the request gives."""
    items = request.get("messages", request.get("input"))
    last = items if isinstance(items, str) else items[-1]
    asked = isinstance(last, str) or (last.get("role") == "user" and "q" in str(last["content"]))
    prompt: Sequence[int] = (1, 2, 3)
    if PRIOR_FIELD in request:
        _, prior = split_prior(b'{"a":0,' + orjson.dumps({PRIOR_FIELD: request[PRIOR_FIELD]})[1:])
        assert prior is not None and prior.renderer == "qwen3"
        prompt = [*unpack_ids(prior.prompt_ids + prior.sampled_ids), 9]
    return Script([CALLS if asked else YES], prompt_ids=prompt)


def echoed(protocol: str, step: Step) -> list[Json]:
    """What a client appends for a reply and for the result of its call."""
    reply = orjson.loads(step.response_json)
    match protocol:
        case "openai.chat":
            calls = reply.get("tool_calls") or ()
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "7"} for c in calls]
            return [reply, *results]
        case "anthropic.messages":
            calls = [b for b in reply["content"] if b["type"] == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": c["id"], "content": "7"} for c in calls
            ]
            return [reply, *([{"role": "user", "content": results}] if results else [])]
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": c["call_id"], "output": "7"} for c in calls
    ]
    return [*reply["output"], *results]


def body_of(protocol: str, items: list[Json], **more: Any) -> Json:
    tools: list[Json] = TOOLS
    if protocol == "anthropic.messages":
        tools = [{"name": "lookup", "input_schema": {"type": "object"}}]
    elif protocol == "openai.responses":
        tools = [{"type": "function", "name": "lookup", "parameters": {}}]
    field = "input" if protocol == "openai.responses" else "messages"
    return {"model": "policy", field: items, "tools": tools, "max_tokens": 9} | more


async def post(w: GatewayFixture, protocol: str, body: Json, path: str = "/t1/g1/v1/") -> Step:
    async with w.http.post(w.url + path + PATHS[protocol], json=body) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()
    return w.steps()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", list(PATHS))
def test_a_conversation_with_tools_is_one_sequence(
    protocol: str, stream: bool, tmp_path: Path
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        items, steps = list[Json](), list[Step]()
        for turn in range(4):
            if turn % 2 == 0:
                items.append({"role": "user", "content": f"q{turn}"})
            body = body_of(protocol, items, stream=stream)
            steps.append(await post(w, protocol, body))
            assert orjson.loads(steps[-1].request_json) == body  # the client's, without ids
            items += echoed(protocol, steps[-1])
        assert steps[0].continuation == Continuation(reason="first_turn")
        for before, after in pairwise(steps):
            assert before.prompt_token_ids and before.response_token_ids and after.prompt_token_ids
            kept = before.prompt_token_ids + before.response_token_ids
            assert after.prompt_token_ids.startswith(kept)
            assert after.continuation == Continuation(
                previous_step_id=before.step_id, kept_tokens=len(kept) // 4
            )
        assert [CONTINUE in h for h in w.engine.headers] == [False, True, True, True]
        assert await w.metric('clawstream_gateway_continuations_total{outcome="first_turn"}') == 1
        assert await w.metric('clawstream_gateway_continuations_total{outcome="kept"}') == 3

    run_gateway(tmp_path, CODEC, scenario, answers, exact_continuation="qwen3")


@pytest.mark.slow
def test_reasons_to_render_a_prompt_are_recorded(tmp_path: Path) -> None:
    chat = "openai.chat"
    question: Json = {"role": "user", "content": "q"}

    async def scenario(w: GatewayFixture) -> None:
        items = [question, *echoed(chat, await post(w, chat, body_of(chat, [question])))]
        bodies = {
            "history_edited": body_of(chat, [{"role": "user", "content": "Q"}, *items[1:]]),
            "tools_changed": body_of(chat, items, tools=[]),
            "model_changed": body_of(chat, items, model="other"),
            "template_changed": body_of(chat, items, chat_template_kwargs={"x": 1}),
            "system_changed": body_of(chat, [{"role": "system", "content": "s"}, *items]),
        }
        for reason, body in bodies.items():
            assert (await post(w, chat, body)).continuation == Continuation(reason=reason)
        elsewhere = await post(w, chat, body_of(chat, items), path="/t2/g1/v1/")
        assert elsewhere.continuation == Continuation(reason="no_memory")
        assert not any(PRIOR_FIELD in request for request in w.engine.requests)
        found = await post(w, chat, body_of(chat, items, n=1))
        assert found.continuation is not None and found.continuation.kept_tokens == 6
        # A client's own field is replaced, not believed.
        forged = body_of(chat, items) | {PRIOR_FIELD: ["x"]}
        again = await post(w, chat, forged)
        assert again.continuation == found.continuation

    run_gateway(tmp_path, CODEC, scenario, answers, exact_continuation="qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["captured", "vllm"])
def test_an_engine_that_keeps_nothing_is_recorded(kind: Any, tmp_path: Path) -> None:
    chat = "openai.chat"
    question: Json = {"role": "user", "content": "q"}
    why = "media" if kind == "captured" else None

    def script(request: Json) -> Script:
        return Script([YES], rendered=why if PRIOR_FIELD in request else None)

    async def scenario(w: GatewayFixture) -> None:
        first = await post(w, chat, body_of(chat, [question]))
        step = await post(w, chat, body_of(chat, [question, *echoed(chat, first), question]))
        assert step.continuation == Continuation(
            previous_step_id=first.step_id, reason=why or "engine"
        )
        assert any(PRIOR_FIELD in r for r in w.engine.requests) == (kind == "captured")

    run_gateway(tmp_path, CODEC, scenario, script, kind=kind, exact_continuation="qwen3")


@pytest.mark.slow
def test_a_run_that_does_not_ask_records_nothing(tmp_path: Path) -> None:
    async def scenario(w: GatewayFixture) -> None:
        items: list[Json] = [{"role": "user", "content": "q"}]
        for _ in range(2):
            step = await post(w, "openai.chat", body_of("openai.chat", items))
            assert step.continuation is None
            items += echoed("openai.chat", step)
        assert not any(PRIOR_FIELD in request for request in w.engine.requests)

    run_gateway(tmp_path, CODEC, scenario, answers)

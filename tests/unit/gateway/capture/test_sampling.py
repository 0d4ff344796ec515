"""Sampling parameters of a step: reported by the engine, or else taken from the request."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.capture.sampling import requested_sampling
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Sampling, Step, Usage

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
ASK: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0.7,
}
APPLIED = Sampling(
    source="engine", temperature=0.7, top_p=0.95, top_k=20, min_p=0.0, presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.05, constraints=("json",), logprobs_mode="processed_logprobs",
)  # fmt: skip


def steps_of(directory: Path, kind: Any, script: Script, **ask: Any) -> list[Step]:
    """Of one call, through the official client."""
    found: list[Step] = []

    async def scenario(w: GatewayFixture) -> None:
        async with AsyncOpenAI(
            base_url=f"{w.url}/t1/g1/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            reply: Any = await client.chat.completions.create(**ASK, **ask)
            if ask.get("stream"):
                [chunk async for chunk in reply]
        found.extend(w.steps())

    partial(run_gateway, directory, Codec(), kind=kind)(scenario, script)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_says_what_the_engine_applied_with_its_defaults(
    tmp_path: Path, stream: bool
) -> None:
    script = Script([HI, HI], sampling=APPLIED, cached=2)
    first, second = steps_of(tmp_path, "captured", script, n=2, stream=stream)
    assert first.sampling == second.sampling == APPLIED
    assert first.usage == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=6)
    assert second.usage is None, "the usage of a call counts once"


@pytest.mark.parametrize("kind", ["captured", "vllm", "text"])
def test_an_engine_that_does_not_say_it_leaves_what_was_asked_for(
    tmp_path: Path, kind: str
) -> None:
    (step,) = steps_of(tmp_path, kind, Script([HI]), extra_body={"top_k": 5})
    assert step.sampling == Sampling(source="request", temperature=0.7, top_k=5)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {}),
        ({"temperature": 1, "top_p": 0.9, "top_k": -1},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 0}),
        ({"temperature": True, "top_p": "1", "top_k": 1.5, "min_p": None}, {}),
        ({"top_k": 2**40, "min_p": float("nan"), "presence_penalty": 10**400}, {}),
        ({"response_format": {"type": "text"}, "tool_choice": "auto"}, {}),
        ({"response_format": {"type": "json_object"}}, {"constraints": ("json_object",)}),
        ({"text": {"format": {"type": "json_schema"}}}, {"constraints": ("json_schema",)}),
        ({"output_format": {"type": "json_schema"}}, {"constraints": ("json_schema",)}),
        ({"structured_outputs": {"regex": "a+", "whitespace_pattern": " "}},
        {"constraints": ("regex",)}),
        ({"tool_choice": "required"}, {"constraints": ("tool_choice",)}),
        ({"tool_choice": {"type": "auto"}}, {}),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"constraints": ("tool_choice",)}),
        ({"tool_choice": {"type": "any"}}, {"constraints": ("tool_choice",)}),
        ({"logit_bias": {"1": 5}, "bad_words": [], "min_tokens": 2},
        {"constraints": ("logit_bias", "min_tokens")}),
        ({"response_format": [], "text": "x", "structured_outputs": 1, "tool_choice": ["x"]},
        {"constraints": ("tool_choice",)}),
    ],
)  # fmt: skip
def test_what_a_request_asks_for(said: dict[str, Any], expected: dict[str, Any]) -> None:
    assert requested_sampling(said) == Sampling(source="request", **expected)

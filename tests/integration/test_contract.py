"""The contract with official clients, the gateway and a real vLLM.

The recorded data equal the client's view and the model's computation.

One engine serves the whole module; the gateways in front of it differ in their settings. Its model
is a short warm start of the demo's with some memorised replies (`support.contract`), so tool calls,
including parallel ones, and reasoning come when a test asks for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal
from uuid import uuid4

import anthropic
import openai
import pytest
import torch
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.contract import (
    CLOSE,
    LESSONS,
    VERSION,
    Contract,
    build_tokenizer,
    checked,
    ids_of,
    logprobs_of,
    seen_text,
    standing,
    teach,
    text_of,
)
from support.patience import until
from support.speakers import SPEAKERS, THINK, THOUGHT, anthropic_client, openai_client
from transformers import AutoModelForCausalLM

from clawstream.gateway.capture.engine_tokens import NO_TOKENS
from clawstream.schemas.records import VersionSpan
from clawstream.schemas.tokens import unpack_ids


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contract]:
    work = tmp_path_factory.mktemp("contract")
    directory = teach(work / "model")
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with standing(work, directory, build_tokenizer(), network) as standing_one:
        yield standing_one


QUESTIONS = ("price of k374 plus 2?", "price of k015 plus 1?")
"""Not memorised: the replies vary, and so do their log-probabilities."""


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", SPEAKERS)
def test_what_is_recorded_is_what_the_client_saw(
    contract: Contract, name: str, stream: bool, tools: bool
) -> None:
    speaker = SPEAKERS[name]
    asked: list[tuple[str, dict[str, Any]]] = [
        (question, {"temperature": 0}) for question in LESSONS
    ]
    asked += [
        (question, {"temperature": 1.0, "seed": seed}) for seed, question in enumerate(QUESTIONS)
    ]
    for question, sampling in asked:
        (seen,), (step,) = contract.ask(speaker, question, tools, stream, **sampling)
        checked(contract, speaker, step, seen, stream)
        if tools and question in LESSONS and name != "openai.completions":
            assert seen == LESSONS[question]


@pytest.mark.parametrize("name", SPEAKERS)
def test_a_stream_says_what_a_plain_reply_says(contract: Contract, name: str) -> None:
    speaker = SPEAKERS[name]
    asked: list[tuple[str, dict[str, Any]]] = [("price of k2", {"temperature": 0})]
    if name != "anthropic.messages":  # vLLM takes no seed there
        asked.append((QUESTIONS[0], {"temperature": 1.0, "seed": 3}))
    for question, sampling in asked:
        for to in (contract.captured, contract.vllm):
            (plain,), (one,) = contract.ask(speaker, question, True, False, to, **sampling)
            (streamed,), (other,) = contract.ask(speaker, question, True, True, to, **sampling)
            assert plain == streamed and plain.finish == streamed.finish
            assert one.response_token_ids == other.response_token_ids
            assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("kind", ["captured", "vllm"])
@pytest.mark.parametrize(
    ("name", "asking"),
    [
        ("openai.chat", {"logprobs": True, "top_logprobs": 2}),
        ("openai.completions", {"logprobs": 2}),
        ("openai.responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
)
def test_log_probabilities_are_shown_to_who_asks(
    contract: Contract, name: str, asking: dict[str, Any], kind: str, stream: bool
) -> None:
    speaker, to = SPEAKERS[name], getattr(contract, kind)
    for more in ({}, asking):
        (seen,), (step,) = contract.ask(
            speaker, "price of k4", False, stream, to, temperature=1.0, seed=1, **more
        )
        assert (seen.logprobs is not None) == bool(more)
        if kind == "captured" or name != "openai.responses":
            assert len(ids_of(step)) == len(logprobs_of(step))
            if seen.logprobs is not None:
                assert seen.logprobs == pytest.approx(
                    logprobs_of(step)[: len(seen.logprobs)], abs=1e-5
                )


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", ["openai.chat", "openai.completions"])
def test_choices_of_a_call_are_sibling_steps(contract: Contract, name: str, stream: bool) -> None:
    speaker = SPEAKERS[name]
    # At this temperature a reply may open a reasoning within a reasoning. In a stream, the engine's
    # parser then shows one tag less.
    tags = {str(contract.tokenizer.convert_tokens_to_ids(tag)): -100 for tag in (THINK, THOUGHT)}
    for to in (contract.captured, contract.vllm):
        seen, steps = contract.ask(
            speaker, QUESTIONS[1], False, stream, to, n=3, temperature=2.0, logit_bias=tags
        )
        assert [step.choice_index for step in steps] == [0, 1, 2]
        assert (
            len({step.call_id for step in steps}) == 1
            and len({step.step_id for step in steps}) == 3
        )
        assert len({step.response_token_ids for step in steps}) > 1
        for choice, step in zip(seen, steps, strict=True):
            assert text_of(contract, ids_of(step), speaker.raw) == seen_text(
                contract, choice, ids_of(step)
            )
            assert len(ids_of(step)) == len(logprobs_of(step))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", SPEAKERS)
def test_a_reply_may_end_for_other_reasons(contract: Contract, name: str, stream: bool) -> None:
    speaker, question = SPEAKERS[name], "price of k4"
    (seen,), (step,) = contract.ask(speaker, question, False, stream, temperature=0, max_tokens=2)
    checked(contract, speaker, step, seen, stream)
    assert (step.finish_reason, len(ids_of(step))) == ("length", 2)
    if name == "openai.completions":
        return  # no memorised reply for completions
    stop: dict[str, Any] = {"stop_sequences" if name == "anthropic.messages" else "stop": [" is "]}
    (seen,), (step,) = contract.ask(speaker, question, False, stream, temperature=0, **stop)
    assert (seen.content, step.finish_reason) == ("the total", "stop")
    # All sampled tokens are recorded, including those that the client does not see.
    assert text_of(contract, ids_of(step), False) == "the total is "


class Arguments(BaseModel):
    key: Literal["k7", "k8", "k9"]


class Lookup(BaseModel):
    name: Literal["lookup"]
    arguments: Arguments


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", ["openai.chat", "openai.responses"])
def test_structured_output_is_parsed_by_the_client(
    contract: Contract, name: str, stream: bool
) -> None:
    trajectory, said = f"t{uuid4().hex}", [{"role": "user", "content": "price of k4"}]

    async def chat(client: AsyncOpenAI) -> Any:
        body: Any = {
            "model": "policy",
            "messages": said,
            "max_tokens": 60,
            "response_format": Lookup,
            "seed": 2,
        }
        if not stream:
            return (await client.chat.completions.parse(**body)).choices[0].message.parsed
        async with client.chat.completions.stream(**body) as events:
            return (await events.get_final_completion()).choices[0].message.parsed

    async def responses(client: AsyncOpenAI) -> Any:
        body: Any = {
            "model": "policy",
            "input": said,
            "max_output_tokens": 60,
            "text_format": Lookup,
        }
        if not stream:
            return (await client.responses.parse(**body)).output_parsed
        async with client.responses.stream(**body) as events:
            return (await events.get_final_response()).output_parsed

    async def ask() -> Any:
        async with openai_client(f"{contract.captured.url}/{trajectory}/g") as client:
            return await (chat(client) if name == "openai.chat" else responses(client))

    parsed = contract.run(ask())
    assert isinstance(parsed, Lookup)
    (step,) = contract.captured.steps(trajectory)
    assert Lookup.model_validate_json(text_of(contract, ids_of(step), False)) == parsed
    assert step.prompt_token_ids is not None
    # The log-probabilities belong to the distribution that was sampled from: tokens that the
    # grammar forbids have probability zero there.
    free = contract.recomputed(unpack_ids(step.prompt_token_ids), ids_of(step))
    assert all(
        sampled > before - CLOSE for sampled, before in zip(logprobs_of(step), free, strict=True)
    )


@pytest.mark.parametrize("name", ["openai.chat", "openai.responses", "anthropic.messages"])
def test_the_next_turn_begins_with_the_tokens_of_this_one(contract: Contract, name: str) -> None:
    speaker = SPEAKERS[name]
    for question in ("price of k1", "price of k2", "price of k3"):
        (seen,), (first,) = contract.ask(speaker, question, True, False, temperature=0)
        conversation = speaker.turns(question, seen, "5")
        (answer,), (second,) = contract.ask(speaker, conversation, True, True, temperature=0)
        checked(contract, speaker, second, answer, True)
        assert first.prompt_token_ids is not None and first.response_token_ids is not None
        assert second.prompt_token_ids is not None
        assert second.prompt_token_ids.startswith(first.prompt_token_ids + first.response_token_ids)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", SPEAKERS)
def test_a_stock_vllm_tells_what_its_protocol_has_fields_for(
    contract: Contract, name: str, stream: bool
) -> None:
    """The same engine without our header behaves as an engine without the middleware."""
    speaker = SPEAKERS[name]
    for question in ("price of k1", "price of k5"):
        (seen,), (step,) = contract.ask(
            speaker, question, True, stream, contract.vllm, temperature=0
        )
        if name != "openai.completions":
            assert seen == LESSONS[question]
        assert (step.versions, step.version_first) == ((), VERSION)
        if name in ("openai.chat", "openai.completions"):
            with_spans = replace(
                step, versions=(VersionSpan(version=VERSION, start=0, end=len(ids_of(step))),)
            )
            checked(contract, speaker, with_spans, seen, stream)
        else:
            assert (step.prompt_token_ids, step.response_token_ids, step.response_logprobs) == (
                None,
                None,
                None,
            )
            assert step.tokens_absent_reason == NO_TOKENS["vllm"]
            assert step.finish_reason == ("tool_calls" if seen.calls else "stop")


def test_a_prompt_is_counted_as_it_will_be_rendered(contract: Contract) -> None:
    async def count() -> Any:
        async with anthropic_client(contract.captured.url) as client:
            messages: Any = [{"role": "user", "content": "price of k1"}]
            return (
                await client.messages.count_tokens(model="policy", messages=messages)
            ).input_tokens

    async def models() -> list[str]:
        async with openai_client(contract.captured.url) as client:
            return [m.id async for m in client.models.list()]

    _, (step,) = contract.ask(SPEAKERS["anthropic.messages"], "price of k1", False, False)
    assert step.prompt_token_ids is not None
    assert contract.run(count()) == len(unpack_ids(step.prompt_token_ids))
    assert contract.run(models()) == ["policy"]


def test_a_client_that_leaves_is_recorded_with_what_it_got(contract: Contract) -> None:
    async def leave(trajectory: str) -> str:
        async with openai_client(f"{contract.captured.url}/{trajectory}/g") as client:
            # Memorised: the reply does not begin with reasoning, which is not content.
            said: Any = [{"role": "user", "content": "price of k4"}]
            async with await client.chat.completions.create(
                model="policy",
                messages=said,
                max_tokens=220,
                stream=True,
                temperature=0,
                extra_body={"ignore_eos": True},
            ) as chunks:
                async for chunk in chunks:  # leave at once, because the engine is fast
                    if got := chunk.choices[0].delta.content:
                        return str(got)
        raise AssertionError("it ended by itself")

    for _ in range(10):  # on a busy machine the engine may finish before this process can leave
        trajectory = f"t{uuid4().hex}"
        got = contract.run(leave(trajectory))
        (step,) = until(lambda t=trajectory: contract.captured.steps(t))
        if step.status == "aborted":
            break
    assert step.status == "aborted" and step.finish_reason is None
    assert json.loads(step.response_json)["content"].startswith(got)
    assert contract.tokenizer.decode(ids_of(step)).startswith(got)
    assert len(ids_of(step)) == len(logprobs_of(step)) < 220


def test_errors_are_those_that_each_client_knows(contract: Contract) -> None:
    async def ask(name: str, base_url: str, **wrong: Any) -> None:
        await SPEAKERS[name].ask(base_url, "price of k1", False, False, **wrong)

    url, anthropics = f"{contract.captured.url}/t/g", "anthropic.messages"
    for name in SPEAKERS:
        sdk: Any = anthropic if name == anthropics else openai
        with pytest.raises(sdk.NotFoundError, match="nobody"):
            contract.run(ask(name, url, model="nobody"))
        with pytest.raises(sdk.BadRequestError, match=r"max_(output_)?tokens"):
            contract.run(ask(name, url, max_tokens=0 if name == anthropics else -1))
        with pytest.raises(sdk.BadRequestError, match="temperature"):
            contract.run(ask(name, url, temperature=-1))
        with pytest.raises(sdk.AuthenticationError, match="key") as refused:
            contract.run(ask(name, f"{contract.locked.url}/t/g"))
        assert refused.value.status_code == 401
    assert contract.captured.steps("t") == contract.locked.steps("t") == []


@pytest.mark.parametrize("name", SPEAKERS)
def test_a_key_opens_a_locked_gateway_to_any_client(contract: Contract, name: str) -> None:
    ours = {"openai": openai_client, "anthropic": anthropic_client}[name.split(".")[0]]

    async def ask(key: str) -> Any:
        async with ours(f"{contract.locked.url}/keyed/g", key=key) as client:
            match name:
                case "openai.chat":
                    said: Any = [{"role": "user", "content": "price of k4"}]
                    return await client.chat.completions.create(
                        model="policy", messages=said, max_tokens=4
                    )
                case "openai.completions":
                    return await client.completions.create(
                        model="policy", prompt="k4", max_tokens=4
                    )
                case "openai.responses":
                    return await client.responses.create(
                        model="policy", input="price of k4", max_output_tokens=4
                    )
            said = [{"role": "user", "content": "price of k4"}]
            return await client.messages.create(model="policy", messages=said, max_tokens=4)

    sdk: Any = anthropic if name == "anthropic.messages" else openai
    assert contract.run(ask(contract.keys["agent"])).model == "policy"
    with pytest.raises(sdk.PermissionDeniedError, match="scope"):
        contract.run(ask(contract.keys["reward"]))

"""Exact continuation with vLLM's own code: its requests and renderer, and a whole server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from support.engine import engine_settings
from support.gateway import running
from support.log_producer import InMemoryLogProducer
from support.qwen3_chat import qwen3_tokenizer
from support.speakers import anthropic_client, openai_client
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.rollout.server.process import VllmServer
from clawstream.rollout.vllm_plugin.continuation import PriorTokens, PromptTap
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.engine_frames import Prior
from clawstream.schemas.records import Step
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, unpack_ids

Json = dict[str, Any]
TOKENIZER = qwen3_tokenizer()
PARAMETERS: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
ARGUMENTS = '{"a":1,"b":30}'
"""The template would write it with spaces."""
THOUGHT_AND_CALL = (
    "<think>\nnumber %d\n</think>\n\n"
    '<tool_call>\n{"name":"add","arguments":{"a":%d,"b":30}}\n</tool_call><|im_end|>'
)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


REPLIES: list[tuple[int, Json]] = [
    (a, {"vllm_xargs": {"reply_ids": ids_of(THOUGHT_AND_CALL % (a, a))}}) for a in range(10)
]
"""Each number, and the fields of a request that make the engine reply so."""


def write_model(directory: Path) -> Path:
    """Write a Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, head_dim=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192,
        tie_word_embeddings=True, eos_token_id=TOKENIZER.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


# ---------------------------------------------------------------- vLLM's renderer, without a server


@pytest.fixture(scope="module")
def online_renderer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    directory = write_model(tmp_path_factory.mktemp("model"))
    arguments = EngineArgs(model=str(directory), max_model_len=2048, dtype="float32")
    config = arguments.create_engine_config()
    return OnlineRenderer(
        config.model_config, renderer_from_config(config), request_logger=None,
        chat_template=None, chat_template_content_format="auto", enable_auto_tools=True,
        tool_parser="hermes", reasoning_parser="qwen3",
    )  # fmt: skip


def requests_of() -> dict[str, Any]:
    """The same conversation as a request of chat completions, Messages and Responses."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    question = {"role": "user", "content": "add"}
    function = {"name": "add", "arguments": ARGUMENTS}
    call = {"id": "c1", "type": "function", "function": function}
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 30}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "31"}
    messages = AnthropicMessagesRequest(
        model="m",
        max_tokens=9,
        tools=[{"name": "add", "input_schema": PARAMETERS}],
        messages=[
            question,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    )
    return {
        "openai.chat": ChatCompletionRequest(
            model="m",
            tools=TOOLS,
            messages=[
                question,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "31"},
            ],
        ),
        "anthropic.messages": AnthropicServingMessages.to_chat_completion_request(messages),
        "openai.responses": ResponsesRequest(
            model="m",
            tools=[{"type": "function", "name": "add", "parameters": PARAMETERS}],
            input=[
                question,
                {"type": "function_call", "call_id": "c1", **function},
                {"type": "function_call_output", "call_id": "c1", "output": "31"},
            ],
        ),
    }


def prompt_of(renderer: Any, name: str) -> list[int]:
    """Render a request of `requests_of` as its endpoint does."""
    request = requests_of()[name]  # rendering changes it
    if name == "openai.responses":
        found = asyncio.run(renderer.render_responses(request)).engine_input
    else:
        _, (found,) = asyncio.run(renderer.render_chat(request))
    return list(found["prompt_token_ids"])


@pytest.mark.filterwarnings("default")
def test_vllm_keeps_the_ids_on_every_endpoint(online_renderer: Any) -> None:
    given = PriorTokens()
    PromptTap(online_renderer.renderer, lambda: given, None)
    prompt = ids_of("<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n")
    call = f'<tool_call>\n{{"name":"add","arguments":{ARGUMENTS}}}\n</tool_call><|im_end|>'
    sampled = ids_of("<think>\nhm\n</think>\n\n" + call)
    tail = ids_of("\n<|im_start|>user\n<tool_response>\n31\n</tool_response><|im_end|>\n")
    tail += ids_of("<|im_start|>assistant\n")
    for name in requests_of():
        rendered = prompt_of(online_renderer, name)
        assert rendered[-len(tail) :] == tail and len(rendered) > len(tail)
        given.prior = Prior("qwen3", pack_ids(prompt), pack_ids(sampled))
        assert prompt_of(online_renderer, name) == [*prompt, *sampled, *tail]
        assert given.reason is None


# ---------------------------------------------------------------- a whole server


@dataclass
class Served:
    """A vLLM that replies as a request says. url: of the server."""

    url: str
    runner: asyncio.Runner


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    work = tmp_path_factory.mktemp("served")
    settings = engine_settings(
        max_model_len=8192,
        startup_timeout_s=600,
        tool_parser="hermes",
        tool_parser_plugin=None,
        reasoning_parser="qwen3",
        extra_args=(
            *("--logits-processors", "support.forced_reply:ForcedReply"),
            "--no-async-scheduling",  # the processor must see every sampled token
        ),
    )
    server = VllmServer(settings, write_model(work / "model"), work / "vllm.log")
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    with closing(asyncio.Runner()) as runner, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

        async def begin() -> None:
            async with aiohttp.ClientSession() as http:
                await server.start()
                await server.wait_ready(http)

        try:
            runner.run(begin())
            yield Served(server.base_url, runner)
        finally:
            runner.run(server.stop())


@asynccontextmanager
async def gateway_of(served: Served, work: Path, family: str | None) -> Any:
    """Run a gateway; yield its URL and a function that returns the steps on the log."""
    gateway = {"upstreams": [served.url], "exact_continuation": family}
    settings = Settings.model_validate({"data_dir": work / str(family), "gateway": gateway})
    producer, codec = InMemoryLogProducer(), Codec()
    app = create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), codec)
    async with running(app) as url:
        yield url, lambda: [codec.decode(m.value) for m in producer.messages]


@dataclass(frozen=True)
class Talk:
    """A conversation on one API. url: of the trajectory; name: unlike that of any other talk."""

    url: str
    name: str
    stream: bool

    @property
    def system(self) -> str:
        """The first words of every prompt, so that no two talks share a prefix in the cache."""
        return f"You are agent {self.name}."


async def chat_turns(talk: Talk) -> None:
    """Talk over chat completions."""
    messages: list[Any] = [
        {"role": "system", "content": talk.system},
        {"role": "user", "content": "count"},
    ]
    async with openai_client(talk.url) as client:
        for a, reply in REPLIES:
            body: Json = {"model": "policy", "messages": messages, "tools": TOOLS}
            body |= {"max_tokens": 300, "extra_body": reply}
            if talk.stream:
                async with client.chat.completions.stream(**body) as events:
                    found = (await events.get_final_completion()).choices[0].message
            else:
                found = (await client.chat.completions.create(**body)).choices[0].message
            (call,) = found.tool_calls or ()
            function = {"name": call.function.name, "arguments": call.function.arguments}
            calls = [{"id": call.id, "type": "function", "function": function}]
            messages += [
                {"role": "assistant", "content": found.content or None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": call.id, "content": str(a + 30)},
            ]
            if a % 3 == 2:
                messages.append({"role": "user", "content": "go on"})


async def messages_turns(talk: Talk) -> None:
    """Talk over Messages."""
    messages: list[Any] = [{"role": "user", "content": "count"}]
    async with anthropic_client(talk.url) as client:
        for a, reply in REPLIES:
            body: Json = {"model": "policy", "messages": messages, "system": talk.system}
            body |= {"tools": [{"name": "add", "input_schema": PARAMETERS}], "max_tokens": 300}
            if talk.stream:
                async with client.messages.stream(extra_body=reply, **body) as events:
                    found = await events.get_final_message()
            else:
                found = await client.messages.create(extra_body=reply, **body)
            echo = [block for block in found.content if block.type != "thinking"]
            (use,) = (block for block in echo if block.type == "tool_use")
            result = {"type": "tool_result", "tool_use_id": use.id, "content": str(a + 30)}
            content = [result] + [{"type": "text", "text": "go on"}] * (a % 3 == 2)
            messages += [
                {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in echo]},
                {"role": "user", "content": content},
            ]


async def responses_turns(talk: Talk) -> None:
    """Talk over Responses."""
    items: list[Any] = [{"role": "user", "content": "count"}]
    tools: list[Any] = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
    async with openai_client(talk.url) as client:
        for a, reply in REPLIES:
            body: Json = {"model": "policy", "input": items, "instructions": talk.system}
            body |= {"tools": tools, "store": False, "extra_body": reply}
            body |= {"max_output_tokens": 300}
            if talk.stream:
                async for event in await client.responses.create(stream=True, **body):
                    if event.type == "response.completed":
                        found = event.response
            else:
                found = await client.responses.create(**body)
            echo = [item for item in found.output if item.type != "reasoning"]
            (call,) = (item for item in echo if item.type == "function_call")
            output = {"type": "function_call_output", "call_id": call.call_id}
            items += [item.model_dump(exclude_none=True) for item in echo]
            items.append(output | {"output": str(a + 30)})
            if a % 3 == 2:
                items.append({"role": "user", "content": "go on"})


async def cache_hits(url: str) -> int:
    """Return the prompt tokens that the engine has taken from its prefix cache so far."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "vllm:prefix_cache_hits_total"
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))


def sequence_of(step: Step) -> list[int]:
    assert step.prompt_token_ids is not None and step.response_token_ids is not None
    return unpack_ids(step.prompt_token_ids + step.response_token_ids)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    "talk", [chat_turns, messages_turns, responses_turns], ids=["chat", "messages", "responses"]
)
def test_ten_turns_are_one_branch_with_it_and_several_without(
    served: Served, talk: Callable[[Talk], Awaitable[None]], stream: bool, tmp_path: Path
) -> None:
    """Agents send each reply back without its reasoning."""

    async def played(family: str | None) -> tuple[list[Step], int]:
        async with gateway_of(served, tmp_path, family) as (url, steps):
            before = await cache_hits(served.url)
            name = f"{family or 'plain'} of {talk.__name__} {stream}"
            await talk(Talk(f"{url}/t{family}-{stream}/g1", name, stream))
            return list(steps()), await cache_hits(served.url) - before

    exact, exact_hits = served.runner.run(played("qwen3"))
    rendered, rendered_hits = served.runner.run(played(None))
    branches, cached = [], []
    for steps in (exact, rendered):
        sequences = [sequence_of(step) for step in steps]
        broken = [b[: len(a)] != a for a, b in pairwise(sequences)]
        branches.append(1 + sum(broken))
        cached.append(sum(step.usage.cached_tokens or 0 for step in steps if step.usage))
    print(f"branches {branches}, cached tokens {cached}")
    assert cached == [exact_hits, rendered_hits]
    assert branches == [1, 10] and cached[0] > cached[1]
    for before, after in pairwise(exact):
        assert after.continuation is not None and after.continuation.reason is None
        assert after.continuation.previous_step_id == before.step_id
        assert after.continuation.kept_tokens == len(sequence_of(before))

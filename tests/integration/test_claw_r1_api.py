"""Claw-R1's white-box loop and the token limits against a real vLLM.

The gateway treats the engine as one with our middleware and as one without it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from support.engine import engine_settings
from support.gateway import running
from support.log_producer import InMemoryLogProducer
from transformers import AutoModelForCausalLM

from clawstream.demo import model
from clawstream.demo.task import TOOLS
from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.rollout.server.process import VllmServer
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

CODEC = Codec()
QUESTION = [{"role": "user", "content": "price of k374 plus 2?"}]
LIMIT = 24


@asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[str]:
    """Run a vLLM server of the toy model; yield its URL."""
    settings = engine_settings(max_num_seqs=16, startup_timeout_s=600)
    server = VllmServer(settings, directory, directory / "vllm.log")
    try:
        async with aiohttp.ClientSession() as http:
            await server.start()
            await server.wait_ready(http)
        yield server.base_url
    finally:
        await server.stop()


class Client:
    """A gateway in front of the engine, and its records."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, producer: InMemoryLogProducer
    ) -> None:
        self._http, self._url, self._producer = http, url, producer

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self._http.post(self._url + path, json=body) as r:
            return r.status, await r.json()

    @property
    def steps(self) -> list[Step]:
        return [r for m in self._producer.messages if isinstance(r := CODEC.decode(m.value), Step)]


@asynccontextmanager
async def gateway(directory: Path, upstream: Any, **more: Any) -> AsyncIterator[Client]:
    settings = Settings.model_validate(
        {"data_dir": directory, "gateway": {"upstreams": [upstream], **more}}
    )
    producer = InMemoryLogProducer()
    app = create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), CODEC)
    async with running(app) as url, aiohttp.ClientSession() as http:
        yield Client(http, url, producer)


def test_claw_r1_against_a_real_engine(tmp_path: Path) -> None:
    directory = model.make_random_model(tmp_path / "model")

    async def scenario() -> None:
        async with engine(directory) as url:
            for upstream in (url, {"url": url, "kind": "vllm"}):
                async with gateway(
                    tmp_path, upstream, tokenizer_path=directory, default_max_tokens=8
                ) as client:
                    await white_box(client, directory)
            async with gateway(
                tmp_path, url, max_prompt_tokens=LIMIT, default_max_tokens=4
            ) as client:
                await long_prompts(client)

    asyncio.run(scenario())


async def white_box(client: Client, directory: Path) -> None:
    """Run a flow of one turn as Claw-R1's agents do."""
    tokenizer = model.build_tokenizer()
    text = tokenizer.apply_chat_template(
        QUESTION, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    sampling = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": True}
    status, said = await client.post(
        "/generate", {"prompt_ids": prompt, "sampling_params": sampling}
    )
    assert status == 200, said
    ids, logprobs = said["token_ids"], said["log_probs"]
    assert (
        0 < len(ids) <= 8
        and len(logprobs) == len(ids)
        and said["stop_reason"] in ("stop", "length")
    )
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        told = torch.log_softmax(
            network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1], -1
        )
    again = told[torch.arange(len(ids)), torch.tensor(ids)].tolist()
    assert max(abs(a - b) for a, b in zip(again, logprobs, strict=True)) < 1e-3
    step = {
        "prompt_ids": prompt, "response_ids": ids, "rollout_log_probs": logprobs,
        "trajectory_uid": "t", "prompt_uid": "g", "step_index": 0, "policy_version": 0,
        "is_last": True, "reward": 1.0, "metadata": {"uid": "g"}, "versions": said["versions"],
    }  # fmt: skip
    assert await client.post("/submit_steps", {"steps": [step]}) == (200, {"accepted": 1})
    (found,) = client.steps
    assert unpack_ids(found.prompt_token_ids or b"") == prompt
    assert unpack_ids(found.response_token_ids or b"") == ids
    assert unpack_logprobs(found.response_logprobs or b"") == logprobs
    assert json.loads(found.response_json)["content"] == tokenizer.decode(
        ids, skip_special_tokens=True
    )
    assert [(v.start, v.end) for v in found.versions] == (
        [(0, len(ids))] if said["versions"] else []
    )


async def long_prompts(client: Client) -> None:
    """Check the limits of prompts.

    The gateway refuses prompts above its own limit by the engine's token count; the engine refuses
    prompts above the engine's limit.
    """
    tokenizer = model.build_tokenizer()
    for extra in (0, 1, 4):
        messages = [{"role": "user", "content": "price of k374 plus 2?" + "7" * extra}]
        text = tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        tokens = len(tokenizer.encode(text, add_special_tokens=False))
        status, said = await client.post(
            "/t/g/v1/chat/completions", {"model": "policy", "messages": messages, "tools": TOOLS}
        )
        assert (status == 200) == (tokens <= LIMIT), (tokens, said)
        if status != 200:
            assert status == 400 and f"has {tokens} tokens" in said["error"]["message"]
        else:
            assert (
                said["usage"]["prompt_tokens"] == tokens and said["usage"]["completion_tokens"] <= 4
            )
    for path, body in (
        ("/t/g/v1/completions", {"model": "policy", "prompt": "7" * (LIMIT + 1)}),
        (
            "/t/g/v1/messages",
            {
                "model": "policy",
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "7" * (LIMIT + 1)}],
            },
        ),
    ):
        status, said = await client.post(path, body)
        assert (
            status == 400 and f"the limit of this gateway is {LIMIT}" in said["error"]["message"]
        ), said
    assert all(len(s.prompt_token_ids or b"") <= 4 * LIMIT for s in client.steps)
    status, said = await client.post(
        "/t/g/v1/responses", {"model": "policy", "input": "7" * (model.MAX_TOKENS + 1)}
    )
    assert status == 400 and str(model.MAX_TOKENS) in said["error"]["message"], said

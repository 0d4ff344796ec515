"""Fixtures of the contract tests: a model with memorised replies, gateways, and reference values.

Recorded steps are compared with the reference values.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import aiohttp
import torch
from support.engine import engine_settings
from support.gateway import running
from support.log_producer import InMemoryLogProducer
from support.speakers import THINK, THOUGHT, TOOLS, Seen, Speaker
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from clawstream.demo import model
from clawstream.gateway.app import create_app
from clawstream.gateway.auth.api_keys import Scope, create_key
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.rollout.server.process import VllmServer
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step, VersionSpan
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

T = TypeVar("T")
IM_END = "<|im_end|>"
REASONING_PARSER = Path(__file__).with_name("reasoning_parser.py")
VERSION = "default"
"""Version of an engine that serves the model it booted with."""
CLOSE = 1e-3


def _calls(*keys: str) -> tuple[tuple[str, str], ...]:
    return tuple(("lookup", f'{{"key": "{key}"}}') for key in keys)


LESSONS = {
    "price of k1": Seen(calls=_calls("k1")),
    "price of k2": Seen(calls=_calls("k1", "k2")),
    "price of k3": Seen("error", _calls("k3")),
    "price of k4": Seen("the total is 7."),
    "price of k5": Seen("the total is 7.", reasoning="k5 plus 2"),
    "price of k6": Seen(calls=_calls("k6"), reasoning="k6?"),
}
"""Questions, and the replies that the model has memorised."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer with reasoning tags added; the demo's has none."""
    tokenizer = model.build_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in (THINK, THOUGHT)])
    return tokenizer


def rendered(tokenizer: PreTrainedTokenizerFast, question: str, tools: Sequence[Any] | None) -> str:
    """Return the prompt that the chat template makes."""
    messages = [{"role": "user", "content": question}]
    return str(
        tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
    )


def teach(directory: Path) -> Path:
    """Write a model: the demo's short warm start, then the memorised lessons. 25 s of one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    network = model.build_model(tokenizer, seed=0)
    model.warm_start(network, tokenizer, seed=0, steps=60, progress=None)
    rows = [_row(tokenizer, question, tools) for question in LESSONS for tools in (TOOLS, None)]
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([i + [0] * (length - len(i)) for i, _ in rows])
    labels = torch.tensor([t + [-100] * (length - len(t)) for _, t in rows])
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(400):
        loss = network(ids, labels=labels).loss
        if loss.item() < 0.01:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    torch.set_num_threads(threads)
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _row(
    tokenizer: PreTrainedTokenizerFast, question: str, tools: Sequence[Any] | None
) -> tuple[list[int], list[int]]:
    """Return the ids of a lesson, and those of them that are to be learned."""
    before = tokenizer.encode(rendered(tokenizer, question, tools), add_special_tokens=False)
    after = tokenizer.encode(LESSONS[question].text() + IM_END, add_special_tokens=False)
    return [*before, *after], [-100] * len(before) + list(after)


@dataclass(frozen=True)
class Gateway:
    """One gateway in front of the engine."""

    url: str
    producer: InMemoryLogProducer
    codec: Codec

    def steps(self, trajectory: str) -> list[Step]:
        """Return the steps of a trajectory, in order."""
        records = [
            self.codec.decode(m.value)
            for m in self.producer.messages
            if m.key == trajectory.encode()
        ]
        return [r for r in records if isinstance(r, Step)]


class Loop:
    """An event loop in its own thread, so that the gateways run while a test computes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(frozen=True)
class Contract:
    """The engine, its model, and the gateways in front of it.

    `captured` and `vllm` name the engine kind that each gateway is configured with.
    """

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    http: aiohttp.ClientSession
    engine: str
    tokenizer: Any
    network: Any
    captured: Gateway
    vllm: Gateway
    locked: Gateway
    keys: dict[str, str]
    """API keys of the locked gateway, by scope."""

    def ask(
        self,
        speaker: Speaker,
        said: Any,
        tools: bool,
        stream: bool,
        to: Gateway | None = None,
        **more: Any,
    ) -> tuple[list[Seen], list[Step]]:
        """Ask in a new trajectory; return the client's view and the recorded steps."""
        to, trajectory = to or self.captured, f"t{uuid4().hex}"
        seen = self.run(speaker.ask(f"{to.url}/{trajectory}/g", said, tools, stream, **more))
        return seen, to.steps(trajectory)

    def rendered(self, path: str, step: Step) -> list[int]:
        """Return the prompt that the engine itself makes of a request."""

        async def render() -> Any:
            headers = {"content-type": "application/json"}
            async with self.http.post(
                f"{self.engine}{path}/render", data=step.request_json, headers=headers
            ) as reply:
                assert reply.status == 200, await reply.text()
                return await reply.json()

        found = self.run(render())
        ids: list[int] = (found[0] if isinstance(found, list) else found)["token_ids"]
        return ids

    def recomputed(self, prompt: list[int], ids: list[int], **more: Any) -> list[float]:
        """Return log-probabilities as transformers computes them in float32.

        more: model inputs besides the ids.
        """
        with torch.inference_mode():
            logits = self.network(torch.tensor([prompt + ids]), **more).logits[
                0, len(prompt) - 1 : -1
            ]
        return [float(row[i]) for row, i in zip(logits.log_softmax(-1), ids, strict=True)]


@asynccontextmanager
async def gateway(directory: Path, engine: str, kind: str, **more: Any) -> AsyncIterator[Gateway]:
    """Run a gateway over an in-memory log."""
    given = {"upstreams": [{"url": engine, "kind": kind}], **more}
    settings = Settings.model_validate({"data_dir": directory, "gateway": given})
    producer, codec = InMemoryLogProducer(), Codec()
    async with running(
        create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), codec)
    ) as url:
        yield Gateway(url, producer, codec)


@contextmanager
def standing(
    work: Path, directory: Path, tokenizer: Any, network: Any, *words: str
) -> Iterator[Contract]:
    """Run a real vLLM that serves a model, and gateways in front of it.

    network: the same model in transformers. words: additional arguments of vLLM.
    """
    settings = engine_settings(
        max_num_seqs=16,
        reasoning_parser="think_tags",
        startup_timeout_s=600,
        extra_args=(
            *("--reasoning-parser-plugin", str(REASONING_PARSER)),
            *("--structured-outputs-config.enable_in_reasoning", "true"),
            "--enable-scale-out",  # with the routes that render a prompt
            *words,
        ),
    )
    server = VllmServer(settings, directory, work / "vllm.log")
    scopes: tuple[Scope, ...] = ("agent", "reward")
    keys = {
        str(scope): create_key(work / "locked" / "api-keys.json", scope, (scope,))
        for scope in scopes
    }
    with closing(Loop()) as loop:
        stack = AsyncExitStack()

        async def begin() -> Contract:
            stack.push_async_callback(server.stop)
            await server.start()
            http = await stack.enter_async_context(aiohttp.ClientSession())
            print(f"vLLM ready after {await server.wait_ready(http):.1f} s")
            url, enter = server.base_url, stack.enter_async_context
            return Contract(
                loop.run,
                http,
                url,
                tokenizer,
                network,
                captured=await enter(gateway(work / "captured", url, "auto")),
                vllm=await enter(gateway(work / "vllm", url, "vllm")),
                locked=await enter(gateway(work / "locked", url, "auto", auth="required")),
                keys=keys,
            )

        try:
            yield loop.run(begin())
        finally:
            loop.run(stack.aclose())


def ids_of(step: Step) -> list[int]:
    assert step.response_token_ids is not None
    return unpack_ids(step.response_token_ids)


def logprobs_of(step: Step) -> list[float]:
    assert step.response_logprobs is not None
    return unpack_logprobs(step.response_logprobs)


def checked(
    contract: Contract, speaker: Speaker, step: Step, seen: Seen, stream: bool, **more: Any
) -> None:
    """Check that a step of an engine with our middleware is complete and equals the client's view.

    more: model inputs besides the ids.
    """
    assert (step.protocol, step.status, step.streamed, step.tokens_absent_reason) == (
        speaker.name,
        "ok",
        stream,
        None,
    )
    assert step.prompt_token_ids is not None and step.response_token_ids is not None
    assert step.response_logprobs is not None and seen.finish is not None
    prompt, ids = unpack_ids(step.prompt_token_ids), unpack_ids(step.response_token_ids)
    logprobs = unpack_logprobs(step.response_logprobs)
    assert text_of(contract, ids, speaker.raw) == seen_text(contract, seen, ids)
    assert len(ids) == len(logprobs) > 0
    assert step.versions == (VersionSpan(version=VERSION, start=0, end=len(ids)),)
    assert step.version_first == VERSION
    assert prompt == contract.rendered(speaker.path, step)
    assert step.finish_reason == ("tool_calls" if seen.calls else speaker.finishes[seen.finish])
    worst = max(
        abs(a - b) for a, b in zip(logprobs, contract.recomputed(prompt, ids, **more), strict=True)
    )
    assert worst < CLOSE


def text_of(contract: Contract, ids: list[int], whole: bool) -> str:
    """Return the text of ids.

    whole: keep the special tokens within the text; the final special token is never shown.
    """
    return str(contract.tokenizer.decode(ids, skip_special_tokens=not whole)).removesuffix(IM_END)


def seen_text(contract: Contract, seen: Seen, ids: list[int]) -> str:
    """Return the text that the client saw, joined from its parts.

    A reply that was cut off may end within its reasoning.
    """
    return seen.text(THOUGHT if contract.tokenizer.convert_tokens_to_ids(THOUGHT) in ids else "")

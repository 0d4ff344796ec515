"""A real vLLM server with our plugin and middleware, for the tests.

The helpers ask it in every protocol, parse its replies, and compute the expected samples.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import torch
from support.ports import free_port
from transformers import AutoModelForCausalLM

from clawstream.demo import model
from clawstream.demo.task import TOOLS
from clawstream.rollout.server.load_weights import engine_label, load_version
from clawstream.rollout.server.process import VllmServer
from clawstream.schemas import engine_frames
from clawstream.schemas.records import Sampling, WeightFile
from clawstream.schemas.settings import RolloutSettings
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

T = TypeVar("T")
tokenizer = model.build_tokenizer()
IM_END = tokenizer.eos_token_id
DEFAULT_TOP_K = 1000


@dataclass(frozen=True)
class Engine:
    """The server, and an event loop with an HTTP session for requests to it."""

    server: VllmServer
    runner: asyncio.Runner
    http: aiohttp.ClientSession
    work: Path

    def run(self, call: Awaitable[T]) -> T:
        async def run() -> T:
            return await call

        return self.runner.run(run())

    @property
    def url(self) -> str:
        return self.server.base_url

    async def load(self, version: str, directory: Path) -> None:
        served = await engine_label(self.http, self.url)
        await load_version(self.http, self.url, version, manifest(directory), self.work, served)


@dataclass(frozen=True)
class Sampled:
    """One choice as reported by capture."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str | None
    spans: list[engine_frames.Span]
    sampling: Sampling | None

    @property
    def text(self) -> str:
        """The text of the ids without special tokens.

        Chat, completions and responses show this text when a request has no tools.
        """
        return str(tokenizer.decode(self.ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Told:
    """The bytes of a reply and its captured tokens: choices by generation and index."""

    own: bytes
    choices: dict[tuple[int, int], Sampled]
    absent: list[str]


@dataclass(frozen=True)
class Reply:
    """The only choice of a reply: the client's view and the capture.

    The reply is plain, or joined from a stream.
    """

    content: str | None
    calls: list[tuple[str, str]]
    finish_reason: str | None
    tokens: Sampled


def manifest(directory: Path) -> tuple[WeightFile, ...]:
    """Return all files of a directory as a version's manifest."""
    return tuple(
        WeightFile(
            url=f.as_uri(),
            sha256=hashlib.sha256(f.read_bytes()).hexdigest(),
            size_bytes=f.stat().st_size,
        )
        for f in sorted(directory.iterdir())
    )


def random_version(work: Path, seed: int) -> Path:
    directory = work / f"random-{seed}"
    return directory if directory.exists() else model.make_random_model(directory, seed)


def engine_settings(**more: Any) -> RolloutSettings:
    """Return settings that serve a model of the demo's size with tool calls.

    more: additional or overriding settings.
    """
    values = {
        "port": free_port(), "dtype": "float32", "max_model_len": model.MAX_TOKENS,
        "kv_cache_mb": 64, "tool_parser": "strict_tags",
        "tool_parser_plugin": Path(model.__file__).with_name("tool_parser.py"),
    }  # fmt: skip
    return RolloutSettings.model_validate(values | more)


@contextmanager
def serving(
    work: Path, lora_rank: int | None = None, extra_args: Sequence[str] = ()
) -> Iterator[Engine]:
    """Run a server on a model of random weights; the server has ended after the block.

    extra_args: further arguments of vLLM.
    """
    # A default of the engine that no request names. It exceeds the size of the vocabulary, so it
    # removes no token.
    defaults = ("--override-generation-config", f'{{"top_k": {DEFAULT_TOP_K}}}')
    settings = engine_settings(
        max_num_seqs=64, startup_timeout_s=600, extra_args=(*defaults, *extra_args)
    )
    server = VllmServer(settings, random_version(work, 0), work / "vllm.log", lora_rank)
    with closing(asyncio.Runner()) as runner:

        async def begin() -> aiohttp.ClientSession:
            http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            await server.start()
            print(f"vLLM ready after {await server.wait_ready(http):.1f} s")
            return http

        try:
            http = runner.run(begin())
            yield Engine(server, runner, http, work)
            runner.run(http.close())
        finally:
            runner.run(server.stop())


def request(question: str = "price of k374 plus 2?", **more: Any) -> dict[str, Any]:
    return {
        "model": "policy",
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "max_tokens": 24,
        **more,
    }


async def post(
    engine: Engine, path: str, body: dict[str, Any], **headers: str
) -> tuple[Mapping[str, str], bytes]:
    """Post a request that must succeed; return the headers and bytes of the reply."""
    async with engine.http.post(engine.url + path, json=body, headers=headers) as reply:
        raw = await reply.read()
        assert reply.status == 200, raw
        assert reply.headers[engine_frames.VERSION_START]
        return reply.headers, raw


async def captured(engine: Engine, path: str, body: dict[str, Any], **headers: str) -> Told:
    """Request capture, and split the reply into its bytes and tokens."""
    found, raw = await post(engine, path, body, **{engine_frames.ASK: "1"}, **headers)
    assert found[engine_frames.ASK] == "1"
    if body.get("stream"):
        events = [event + b"\n\n" for event in raw.split(b"\n\n")[:-1]]
        frames = [
            frame
            for event in events
            if engine_frames.is_comment(event)
            for frame in engine_frames.read_comment(event)
        ]
        own = b"".join(event for event in events if not engine_frames.is_comment(event))
    else:
        own, frames = engine_frames.split(raw, found[engine_frames.OWN_BODY])
    return folded(own, frames)


def folded(own: bytes, frames: Sequence[engine_frames.Frame]) -> Told:
    prompts: dict[int, list[int]] = {}
    how: dict[int, Sampling] = {}
    choices: dict[tuple[int, int], Sampled] = {}
    absent = []
    for generation, prompt_ids, news, reason, sampling, cached, _ in frames:
        if prompt_ids is not None:
            assert generation not in prompts and sampling is not None
            prompts[generation], how[generation] = unpack_ids(prompt_ids), sampling
            assert cached is not None and 0 <= cached < len(prompts[generation])
        absent += [reason] if reason is not None else []
        for which, ids, logprobs, finish, spans in news:
            had = choices.get(
                (generation, which), Sampled(prompts[generation], [], [], None, [], how[generation])
            )
            assert had.finish is None
            assert logprobs is not None
            choices[generation, which] = Sampled(
                had.prompt_ids,
                had.ids + unpack_ids(ids),
                had.logprobs + unpack_logprobs(logprobs),
                finish,
                list(spans or ()),
                had.sampling,
            )
    return Told(own, choices, absent)


async def chat(engine: Engine, body: dict[str, Any]) -> Reply:
    """Ask with or without streaming, as body["stream"] requests."""
    told = await captured(engine, "/v1/chat/completions", body)
    content, calls, finish = read_chat(told.own, bool(body.get("stream")))
    return Reply(content, calls, finish, told.choices[0, 0])


Seen = tuple[str | None, list[tuple[str, str]], str | None]
"""Content, calls (name and arguments), and the protocol's finish reason of the only choice."""


def data_of(stream: bytes) -> list[dict[str, Any]]:
    """Return the data of all events except the end marker."""
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_chat(body: bytes, stream: bool) -> Seen:
    if not stream:
        (choice,) = json.loads(body)["choices"]
        message = choice["message"]
        calls = [
            (c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls") or []
        ]
        return message["content"], calls, choice["finish_reason"]
    assert body.endswith(b"data: [DONE]\n\n")
    choices = [choice for chunk in data_of(body) for choice in chunk["choices"]]
    made: dict[int, tuple[str, str]] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls") or []:
            had, function = made.get(call["index"], ("", "")), call["function"]
            made[call["index"]] = (
                had[0] + (function.get("name") or ""),
                had[1] + (function.get("arguments") or ""),
            )
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    finish = next(choice["finish_reason"] for choice in choices if choice["finish_reason"])
    return text or None, [made[i] for i in sorted(made)], finish


def read_completion(body: bytes, stream: bool) -> Seen:
    choices = [
        choice
        for chunk in (data_of(body) if stream else [json.loads(body)])
        for choice in chunk["choices"]
    ]
    return "".join(choice["text"] for choice in choices) or None, [], choices[-1]["finish_reason"]


def read_response(body: bytes, stream: bool) -> Seen:
    if not stream:
        whole = json.loads(body)
        calls = [
            (item["name"], item["arguments"])
            for item in whole["output"]
            if item["type"] == "function_call"
        ]
        messages = [item for item in whole["output"] if item["type"] == "message"]
        text = "".join(part["text"] for item in messages for part in item["content"])
        return text or None, calls, whole["status"]
    events = data_of(body)
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    arguments = "".join(
        e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"
    )
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    assert arguments == "".join(argument for _, argument in calls)
    return text or None, calls, events[-1]["response"]["status"]


def read_message(body: bytes, stream: bool) -> Seen:
    if not stream:
        whole = json.loads(body)
        calls = [
            (part["name"], json.dumps(part["input"]))
            for part in whole["content"]
            if part["type"] == "tool_use"
        ]
        text = "".join(part["text"] for part in whole["content"] if part["type"] == "text")
        return text or None, calls, whole["stop_reason"]
    events = data_of(body)
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    names = {
        e["index"]: e["content_block"].get("name")
        for e in events
        if e["type"] == "content_block_start"
    }
    arguments = dict.fromkeys((index for index, name in names.items() if name), "")
    for event in events:
        if event["type"] == "content_block_delta" and event["index"] in arguments:
            arguments[event["index"]] += event["delta"]["partial_json"]
    (stop,) = (e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
    return text or None, [(names[index], said) for index, said in arguments.items()], stop


@functools.cache
def network_of(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def logprobs_of(directory: Path, prompt: list[int], ids: list[int]) -> list[float]:
    """Return log-probabilities as transformers computes them in float32."""
    with torch.inference_mode():
        table = (
            network_of(directory)(torch.tensor([prompt + ids]))
            .logits[0, len(prompt) - 1 : -1]
            .log_softmax(-1)
        )
    return [float(row[i]) for row, i in zip(table, ids, strict=True)]


def worst(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def spans_cover(tokens: Sampled) -> bool:
    ends = [0, *(end for _, _, end in tokens.spans)]
    return [start for _, start, _ in tokens.spans] == ends[:-1] and ends[-1] == len(
        tokens.ids
    ) == len(tokens.logprobs)


RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
MESSAGE_TOOLS = [
    {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS
]


@dataclass(frozen=True)
class Wire:
    """A protocol: its path, its body for a question with or without tools, and its reply parser."""

    path: str
    body: Callable[[str, bool], dict[str, Any]]
    read: Callable[[bytes, bool], Seen]


WIRES = {
    "chat": Wire(
        "/v1/chat/completions",
        lambda said, tools: (
            {"messages": [{"role": "user", "content": said}], "max_tokens": 60}
            | ({"tools": TOOLS} if tools else {})
        ),
        read_chat,
    ),
    "completions": Wire(
        "/v1/completions", lambda said, _: {"prompt": said, "max_tokens": 60}, read_completion
    ),
    "responses": Wire(
        "/v1/responses",
        lambda said, tools: (
            {"input": said, "max_output_tokens": 60} | ({"tools": RESPONSE_TOOLS} if tools else {})
        ),
        read_response,
    ),
    "messages": Wire(
        "/v1/messages",
        lambda said, tools: (
            {"messages": [{"role": "user", "content": said}], "max_tokens": 60}
            | ({"tools": MESSAGE_TOOLS} if tools else {})
        ),
        read_message,
    ),
}


def rendered(question: str, tools: Any) -> str:
    """Return the prompt that the chat template makes."""
    messages = [{"role": "user", "content": question}]
    return str(
        tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
    )


PASSING = re.compile(rb'"created(_at)?":[0-9.]+|(chatcmpl-tool-|call_|msg_|resp_|fc_)[0-9a-f]+')
"""Times and ids that differ from call to call."""


def shape(value: Any) -> Any:
    """Return the fields and types of a JSON value without its content.

    The field names of a completion's `top_logprobs` are tokens.
    """
    if isinstance(value, dict):
        return {
            key: shape(inner) if key != "top_logprobs" else type(inner).__name__
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return sorted({json.dumps(shape(inner)) for inner in value})
    return type(value).__name__


def seen_by_index(body: bytes) -> dict[int, str]:
    """Return the text of each choice of chat or completions, plain or streamed."""
    texts: dict[int, str] = {}
    for chunk in [json.loads(body)] if body.startswith(b"{") else data_of(body):
        for choice in chunk["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("content") or "")
    return texts


def comparable(wire: Wire, reply: bytes, stream: bool) -> Any:
    """Return a reply without the values that differ between calls.

    For a stream, return the joined content, because vLLM's scheduling determines the event
    boundaries.
    """
    if not stream:
        return PASSING.sub(b"", reply)
    shapes = {json.dumps(shape(event)) for event in data_of(reply)}
    return shapes, seen_by_index(reply) if wire.read in (read_chat, read_completion) else wire.read(
        reply, True
    )


def taught(directory: Path, replies: Mapping[str, str]) -> Path:
    """Return a model that has memorised its replies. replies: by question."""
    torch.set_num_threads(1)
    network = model.build_model(tokenizer, seed=0)
    rows = []
    for question, said in replies.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tools=TOOLS,
            add_generation_prompt=True,
            tokenize=False,
        )
        before = tokenizer.encode(prompt, add_special_tokens=False)
        after = tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)
        rows.append(([*before, *after], [-100] * len(before) + list(after)))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([i + [0] * (length - len(i)) for i, _ in rows])
    labels = torch.tensor([t + [-100] * (length - len(t)) for _, t in rows])
    optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3)
    for _ in range(300):
        loss = network(ids, labels=labels).loss
        if loss.item() < 1e-3:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    network.save_pretrained(directory)
    return directory

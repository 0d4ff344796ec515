"""A real vLLM server with our plugin, middleware and tool parser: tokens, log-probabilities, versions, reloads, tool calls, its end.

One server serves the whole module: starting it takes most of a minute.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests_ports import free_port
from transformers import AutoModelForCausalLM

from demo import model
from demo.agent import TOOLS
from rollout.capture import BEAM_SEARCH
from rollout.errors import EngineUnavailable, InvalidWeights, ServerFailed
from rollout.server import VllmServer
from rollout.weights import engine_label, load_version
from schemas import capture
from schemas.events import WeightFile
from schemas.settings import RolloutSettings
from schemas.tokens import unpack_ids, unpack_logprobs

T = TypeVar("T")
tokenizer = model.build_tokenizer()
IM_END = tokenizer.eos_token_id
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Engine:
    """The server, and a loop with an HTTP session to talk to it."""

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
        await load_version(self.http, self.url, version, manifest(directory), self.work)


@dataclass(frozen=True)
class Sampled:
    """One choice, as capture tells it."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str | None
    spans: list[capture.Span]

    @property
    def text(self) -> str:
        """What the ids say, less the special tokens: so chat, completions and responses show it when they know of no tools."""
        return str(tokenizer.decode(self.ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Told:
    """A reply's own bytes, and the tokens beside it: choices by generation and index."""

    own: bytes
    choices: dict[tuple[int, int], Sampled]
    absent: list[str]


@dataclass(frozen=True)
class Reply:
    """The one choice of a reply, plain or put together from a stream: what the client sees, and what capture tells."""

    content: str | None
    calls: list[tuple[str, str]]
    finish_reason: str | None
    tokens: Sampled


def manifest(directory: Path) -> tuple[WeightFile, ...]:
    """All files of a directory as a version's manifest."""
    return tuple(
        WeightFile(url=f.as_uri(), sha256=hashlib.sha256(f.read_bytes()).hexdigest(), size_bytes=f.stat().st_size)
        for f in sorted(directory.iterdir())
    )


def random_version(work: Path, seed: int) -> Path:
    directory = work / f"random-{seed}"
    return directory if directory.exists() else model.make_random_model(directory, seed)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    work = tmp_path_factory.mktemp("rollout")
    settings = RolloutSettings(
        port=free_port(),
        dtype="float32",
        max_model_len=model.MAX_TOKENS,
        max_num_seqs=64,
        kv_cache_mb=64,
        tool_parser="strict_tags",
        tool_parser_plugin=Path(model.__file__).with_name("tool_parser.py"),
        startup_timeout_s=240,
    )
    server = VllmServer(settings, random_version(work, 0), work / "vllm.log")
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


async def post(engine: Engine, path: str, body: dict[str, Any], **headers: str) -> tuple[Mapping[str, str], bytes]:
    """Headers and bytes of a reply that must be one."""
    async with engine.http.post(engine.url + path, json=body, headers=headers) as reply:
        raw = await reply.read()
        assert reply.status == 200, raw
        assert reply.headers[capture.VERSION_START]
        return reply.headers, raw


async def captured(engine: Engine, path: str, body: dict[str, Any], **headers: str) -> Told:
    """Ask for capture, and take the reply apart."""
    found, raw = await post(engine, path, body, **{capture.ASK: "1"}, **headers)
    assert found[capture.ASK] == "1"
    if body.get("stream"):
        events = [event + b"\n\n" for event in raw.split(b"\n\n")[:-1]]
        frames = [frame for event in events if capture.is_comment(event) for frame in capture.read_comment(event)]
        own = b"".join(event for event in events if not capture.is_comment(event))
    else:
        own, frames = capture.split(raw, found[capture.OWN_BODY])
    return folded(own, frames)


def folded(own: bytes, frames: Sequence[capture.Frame]) -> Told:
    prompts: dict[int, list[int]] = {}
    choices: dict[tuple[int, int], Sampled] = {}
    absent = []
    for generation, prompt_ids, news, reason in frames:
        if prompt_ids is not None:
            assert generation not in prompts
            prompts[generation] = unpack_ids(prompt_ids)
        absent += [reason] if reason is not None else []
        for which, ids, logprobs, finish, spans in news:
            had = choices.get((generation, which), Sampled(prompts[generation], [], [], None, []))
            assert had.finish is None
            assert logprobs is not None
            choices[generation, which] = Sampled(
                had.prompt_ids,
                had.ids + unpack_ids(ids),
                had.logprobs + unpack_logprobs(logprobs),
                finish,
                list(spans or ()),
            )
    return Told(own, choices, absent)


async def chat(engine: Engine, body: dict[str, Any]) -> Reply:
    """Ask, in the way that body["stream"] says."""
    told = await captured(engine, "/v1/chat/completions", body)
    content, calls, finish = read_chat(told.own, bool(body.get("stream")))
    return Reply(content, calls, finish, told.choices[0, 0])


Seen = tuple[str | None, list[tuple[str, str]], str | None]
"""Content, calls (name and arguments), and the protocol's finish reason of a reply's only choice."""


def data_of(stream: bytes) -> list[dict[str, Any]]:
    """Data of all events but the end marker."""
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_chat(body: bytes, stream: bool) -> Seen:
    if not stream:
        (choice,) = json.loads(body)["choices"]
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
        return message["content"], calls, choice["finish_reason"]
    assert body.endswith(b"data: [DONE]\n\n")
    choices = [choice for chunk in data_of(body) for choice in chunk["choices"]]
    made: dict[int, tuple[str, str]] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls") or []:
            had, function = made.get(call["index"], ("", "")), call["function"]
            made[call["index"]] = (had[0] + (function.get("name") or ""), had[1] + (function.get("arguments") or ""))
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    finish = next(choice["finish_reason"] for choice in choices if choice["finish_reason"])
    return text or None, [made[i] for i in sorted(made)], finish


def read_completion(body: bytes, stream: bool) -> Seen:
    choices = [choice for chunk in (data_of(body) if stream else [json.loads(body)]) for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices) or None, [], choices[-1]["finish_reason"]


def read_response(body: bytes, stream: bool) -> Seen:
    if not stream:
        whole = json.loads(body)
        calls = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
        messages = [item for item in whole["output"] if item["type"] == "message"]
        text = "".join(part["text"] for item in messages for part in item["content"])
        return text or None, calls, whole["status"]
    events = data_of(body)
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    arguments = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    assert arguments == "".join(argument for _, argument in calls)
    return text or None, calls, events[-1]["response"]["status"]


def read_message(body: bytes, stream: bool) -> Seen:
    if not stream:
        whole = json.loads(body)
        calls = [(part["name"], json.dumps(part["input"])) for part in whole["content"] if part["type"] == "tool_use"]
        text = "".join(part["text"] for part in whole["content"] if part["type"] == "text")
        return text or None, calls, whole["stop_reason"]
    events = data_of(body)
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    names = {e["index"]: e["content_block"].get("name") for e in events if e["type"] == "content_block_start"}
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
    """What transformers says in float32."""
    with torch.inference_mode():
        table = network_of(directory)(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [float(row[i]) for row, i in zip(table, ids, strict=True)]


def worst(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def spans_cover(tokens: Sampled) -> bool:
    ends = [0, *(end for _, _, end in tokens.spans)]
    return [start for _, start, _ in tokens.spans] == ends[:-1] and ends[-1] == len(tokens.ids) == len(tokens.logprobs)


RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
MESSAGE_TOOLS = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]


@dataclass(frozen=True)
class Wire:
    """A protocol: where it is served, its body for a question, with tools or without, and how its replies are read."""

    path: str
    body: Callable[[str, bool], dict[str, Any]]
    read: Callable[[bytes, bool], Seen]


WIRES = {
    "chat": Wire(
        "/v1/chat/completions",
        lambda said, tools: (
            {"messages": [{"role": "user", "content": said}], "max_tokens": 60} | ({"tools": TOOLS} if tools else {})
        ),
        read_chat,
    ),
    "completions": Wire("/v1/completions", lambda said, _: {"prompt": said, "max_tokens": 60}, read_completion),
    "responses": Wire(
        "/v1/responses",
        lambda said, tools: {"input": said, "max_output_tokens": 60} | ({"tools": RESPONSE_TOOLS} if tools else {}),
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WIRES)
def test_tokens_are_those_of_the_text_and_logprobs_those_of_the_model(engine: Engine, name: str, stream: bool) -> None:
    wire, question = WIRES[name], "price of k374 plus 2?"
    for seed in range(2):
        body = {"model": "policy", "temperature": 1.0, "seed": seed, "stream": stream} | wire.body(question, False)
        told = engine.run(captured(engine, wire.path, body))
        (tokens,) = told.choices.values()
        content, calls, _ = wire.read(told.own, stream)
        said = tokenizer.decode(tokens.ids).removesuffix("<|im_end|>") if name == "messages" else tokens.text
        assert (content or "", calls) == (said, [])
        assert tokenizer.decode(tokens.prompt_ids) == (question if name == "completions" else rendered(question, None))
        assert tokens.finish == ("stop" if tokens.ids[-1] == IM_END else "length")
        assert tokens.spans == [(engine.run(engine_label(engine.http, engine.url)), 0, len(tokens.ids))]
        assert len(tokens.logprobs) == len(tokens.ids)
        expected = logprobs_of(random_version(engine.work, 0), tokens.prompt_ids, tokens.ids)
        assert worst(tokens.logprobs, expected) < 1e-3


def rendered(question: str, tools: Any) -> str:
    """The prompt that the chat template makes."""
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False))


def test_every_choice_of_every_prompt_has_its_tokens(engine: Engine) -> None:
    for stream in (False, True):
        body = request(n=3, temperature=1.0, max_tokens=9, stream=stream, tools=None)
        told = engine.run(captured(engine, "/v1/chat/completions", body))
        assert seen_by_index(told.own) == {which: c.text for (_, which), c in told.choices.items()}
        assert {c.finish for c in told.choices.values()} <= {"stop", "length"}
        assert len(told.choices) == 3

        body = {"model": "policy", "prompt": ["k1", "k2", "k3"], "n": 2, "temperature": 1.0, "max_tokens": 9}
        told = engine.run(captured(engine, "/v1/completions", body | {"stream": stream}))
        assert seen_by_index(told.own) == {2 * g + which: c.text for (g, which), c in told.choices.items()}
        for (generation, _), choice in told.choices.items():
            assert tokenizer.decode(choice.prompt_ids) == body["prompt"][generation]
            assert spans_cover(choice)
        assert len(told.choices) == 6


def seen_by_index(body: bytes) -> dict[int, str]:
    """Text of each choice of chat or completions, plain or streamed."""
    texts: dict[int, str] = {}
    for chunk in [json.loads(body)] if body.startswith(b"{") else data_of(body):
        for choice in chunk["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("content") or "")
    return texts


def test_searched_beams_have_no_tokens_and_say_so(engine: Engine) -> None:
    beams: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0.0, "max_tokens": 5}
    for path, body in (
        ("/v1/chat/completions", request(**beams)),
        ("/v1/completions", {"prompt": ["k1", "k2"], **beams}),
    ):
        told = engine.run(captured(engine, path, {"model": "policy", **body}))
        assert told.choices == {}
        assert told.absent == [BEAM_SEARCH]


def test_any_request_is_answered_as_one_that_can_be_captured(engine: Engine) -> None:
    async def probe() -> None:
        async with engine.http.get(f"{engine.url}/version", headers={capture.ASK: "1"}) as reply:
            assert reply.headers[capture.ASK] == "1"
            assert capture.OWN_BODY not in reply.headers
            assert set(await reply.json()) == {"version"}
        async with engine.http.get(f"{engine.url}/version") as reply:
            assert capture.ASK not in reply.headers

    engine.run(probe())


PASSING = re.compile(rb'"created(_at)?":[0-9.]+|(chatcmpl-tool-|call_|msg_|resp_|fc_)[0-9a-f]+')
"""Times and ids that differ from call to call."""


def shape(value: Any) -> Any:
    """A JSON value without what it says: which fields there are, and of what type."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return sorted({json.dumps(shape(inner)) for inner in value})
    return type(value).__name__


def comparable(wire: Wire, reply: bytes, stream: bool) -> Any:
    """A reply less what differs from call to call; of a stream, which vLLM cuts into events as it happens to be scheduled, what it says."""
    if not stream:
        return PASSING.sub(b"", reply)
    shapes = {json.dumps(shape(event)) for event in data_of(reply)}
    return shapes, seen_by_index(reply) if wire.read in (read_chat, read_completion) else wire.read(reply, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("chat", {}),
        ("chat", {"n": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        ("chat", {"stop": ["k"], "stream_options": {"include_usage": True}}),
        ("completions", {"prompt": ["k1", "k2"], "n": 2}),
        ("completions", {"echo": True, "logprobs": 2}),
        ("responses", {}),
        ("responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("messages", {}),
    ],
)
def test_the_client_sees_the_same_with_and_without_capture(
    engine: Engine, name: str, more: dict[str, Any], stream: bool
) -> None:
    wire, id_ = WIRES[name], {"x-request-id": "one"}
    for tools in (False, True):
        # With one candidate left the sampling is certain, and its path through the engine that of any other sampling.
        body = {"model": "policy", "temperature": 1.0, "top_k": 1, "stream": stream} | wire.body("k1", tools) | more
        if not stream:
            body.pop("stream_options", None)
        _, without = engine.run(post(engine, wire.path, body, **id_))
        told = engine.run(captured(engine, wire.path, body, **id_))
        assert comparable(wire, told.own, stream) == comparable(wire, without, stream)
        assert told.choices


def test_five_reloads_under_load_lose_nothing_and_label_every_token(engine: Engine) -> None:
    versions = {f"run/{i}.0": random_version(engine.work, i) for i in range(6)}
    replies: list[Sampled] = []

    async def client(stream: bool, until: asyncio.Event) -> None:
        while not until.is_set():
            body = request(temperature=1.0, max_tokens=200, ignore_eos=True, stream=stream)
            replies.append((await chat(engine, body)).tokens)

    async def scenario() -> None:
        await engine.load("run/0.0", versions["run/0.0"])
        loaded = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for i in range(16):
                clients.create_task(client(i % 2 == 0, loaded))
            for version, directory in list(versions.items())[1:]:
                await asyncio.sleep(0.4)
                result = await load_version(engine.http, engine.url, version, manifest(directory), engine.work)
                print(version, result, f"{result.total_ms:.0f} ms")
                assert await engine_label(engine.http, engine.url) == version
            loaded.set()

    engine.run(scenario())
    order = list(versions)
    for reply in replies:
        assert len(reply.ids) == 200
        assert spans_cover(reply)
        seen = [order.index(version) for version, _, _ in reply.spans]
        assert seen == sorted(set(seen))
    crossing = [reply for reply in replies if len(reply.spans) > 1]
    assert {version for reply in crossing for version, _, _ in reply.spans} == set(order)
    # A token's log-probability is that of the version its span names, over everything before it.
    for reply in crossing[:3] + crossing[-3:]:
        for version, start, end in reply.spans:
            prefix = reply.prompt_ids + reply.ids[:start]
            expected = logprobs_of(versions[version], prefix, reply.ids[start:end])
            assert worst(reply.logprobs[start:end], expected) < 1e-3


def break_file(files: Path) -> None:
    data = bytearray((files / "model.safetensors").read_bytes())
    data[-1] ^= 0xFF
    (files / "model.safetensors").write_bytes(data)


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(files: Path) -> None:
        tensors = load_file(files / "model.safetensors")
        change(tensors)
        save_file(tensors, files / "model.safetensors", metadata={"format": "pt"})

    return apply


@pytest.mark.parametrize(
    ("damage", "after_publishing", "reason"),
    [
        (break_file, True, "sha256"),
        (lambda files: (files / "model.safetensors").unlink(), True, "No such file"),
        (lambda files: (files / "model.safetensors").write_bytes(b"\x08"), False, "deserializ"),
        (rewrite(lambda t: t.pop("model.norm.weight")), False, "missing: model.norm.weight"),
        (rewrite(lambda t: t.update(more=torch.zeros(1))), False, "unknown: more"),
        (rewrite(lambda t: t.update({"lm_head.weight": t["lm_head.weight"][1:].clone()})), False, "dtype or shape"),
        (rewrite(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()})), False, "dtype or shape"),
        (rewrite(lambda t: t["model.norm.weight"].fill_(float("nan"))), False, "not finite"),
    ],
)
def test_a_bad_version_is_refused_and_the_old_one_serves_on(
    engine: Engine, tmp_path: Path, damage: Callable[[Path], None], after_publishing: bool, reason: str
) -> None:
    good = random_version(engine.work, 0)
    bad = tmp_path / "bad"
    shutil.copytree(random_version(engine.work, 1), bad)
    if not after_publishing:
        damage(bad)
    files = manifest(bad)
    if after_publishing:
        damage(bad)
    engine.run(engine.load("run/7.0", good))
    with pytest.raises(InvalidWeights, match=reason):
        engine.run(load_version(engine.http, engine.url, "run/8.0", files, engine.work))
    reply = engine.run(chat(engine, request(temperature=1.0, ignore_eos=True)))
    assert reply.tokens.spans == [("run/7.0", 0, 24)]
    assert worst(reply.tokens.logprobs, logprobs_of(good, reply.tokens.prompt_ids, reply.tokens.ids)) < 1e-3


def test_an_update_left_open_by_a_killed_worker_is_no_obstacle(engine: Engine) -> None:
    async def leave_open() -> None:
        for path in ("/start_weight_update", "/pause?mode=keep&clear_cache=true"):
            async with engine.http.post(engine.url + path) as reply:
                assert reply.status == 200

    engine.run(leave_open())
    engine.run(engine.load("run/7.1", random_version(engine.work, 2)))
    reply = engine.run(chat(engine, request(temperature=1.0, ignore_eos=True)))
    assert reply.tokens.spans == [("run/7.1", 0, 24)]


CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "k1"}}</tool_call>'
REPLIES = {
    "price of k1": (CALL, [("lookup", '{"key": "k1"}')], None),
    "price of k2": (CALL + CALL, [("lookup", '{"key": "k1"}')] * 2, None),
    "price of k3": ("error" + CALL, [("lookup", '{"key": "k1"}')], "error"),
    "price of k4": ("the total is 7.", [], "the total is 7."),
    # Lenient parsers take these for calls.
    "price of k5": (CALL.removesuffix("</tool_call>"), [], CALL.removesuffix("</tool_call>")),
    "price of k6": (CALL + "error", [], CALL + "error"),
    "price of k7": ("<tool_call></tool_call>", [], "<tool_call></tool_call>"),
}


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned these replies by heart."""
    torch.set_num_threads(1)
    network = model.build_model(tokenizer, seed=0)
    rows = []
    for question, (said, _, _) in REPLIES.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tools=TOOLS, add_generation_prompt=True, tokenize=False
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
    directory = tmp_path_factory.mktemp("parrot")
    network.save_pretrained(directory)
    return directory


FINISHES = {
    "chat": ("tool_calls", "stop"),
    "responses": ("completed", "completed"),
    "messages": ("tool_use", "end_turn"),
}


@pytest.mark.parametrize("name", FINISHES)
def test_streamed_and_plain_replies_give_the_same_strict_calls(engine: Engine, parrot: Path, name: str) -> None:
    engine.run(engine.load(f"run/9.{list(FINISHES).index(name)}", parrot))
    wire = WIRES[name]
    for question, (said, calls, content) in REPLIES.items():
        for stream in (False, True):
            body = {"model": "policy", "temperature": 0.0, "stream": stream} | wire.body(question, True)
            told = engine.run(captured(engine, wire.path, body))
            tokens = told.choices[0, 0]
            assert tokenizer.decode(tokens.prompt_ids) == rendered(question, TOOLS)
            assert tokenizer.decode(tokens.ids) == said + "<|im_end|>", question
            assert wire.read(told.own, stream) == (content, calls, FINISHES[name][0 if calls else 1]), (
                question,
                stream,
            )
            assert tokens.finish == "stop"
            assert spans_cover(tokens)
            assert worst(tokens.logprobs, logprobs_of(parrot, tokens.prompt_ids, tokens.ids)) < 1e-3


def test_turn_two_starts_with_exactly_the_tokens_of_turn_one(engine: Engine, parrot: Path) -> None:
    engine.run(engine.load("run/9.3", parrot))
    for question in REPLIES:
        first = engine.run(chat(engine, request(question, temperature=0.0, max_tokens=60)))
        message: dict[str, Any] = {"role": "assistant", "content": first.content}
        if first.calls:
            message["tool_calls"] = [
                {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(first.calls)
            ]
        again = request(question, max_tokens=1)
        again["messages"] += [message, {"role": "user", "content": "price of k1"}]
        second = engine.run(chat(engine, again))
        turn = first.tokens.prompt_ids + first.tokens.ids
        assert second.tokens.prompt_ids[: len(turn)] == turn


def test_tools_that_must_not_be_called_are_not(engine: Engine, parrot: Path) -> None:
    engine.run(engine.load("run/9.4", parrot))
    for stream in (False, True):
        body = request("price of k1", temperature=0.0, max_tokens=60, stream=stream, tool_choice="none")
        reply = engine.run(chat(engine, body))
        assert (reply.calls, reply.content) == ([], CALL)


def test_a_client_that_leaves_stops_the_engine(engine: Engine) -> None:
    async def counted(metric: str) -> float:
        async with engine.http.get(f"{engine.url}/metrics") as reply:
            lines = [line for line in (await reply.text()).splitlines() if line.startswith(metric)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def scenario() -> None:
        before = await counted("vllm:generation_tokens_total")
        body = request(max_tokens=230, ignore_eos=True, stream=True, tools=None)
        headers, url = {capture.ASK: "1"}, f"{engine.url}/v1/chat/completions"
        async with engine.http.post(url, json=body, headers=headers) as reply:
            events = [await reply.content.readuntil(b"\n\n") for _ in range(8)]
            reply.close()
        frames = [frame for event in events if capture.is_comment(event) for frame in capture.read_comment(event)]
        told = folded(b"".join(event for event in events if not capture.is_comment(event)), frames)
        (tokens,) = told.choices.values()
        shown = seen_by_index(told.own)[0]
        assert shown
        # All that was shown is told; of the last comment read, the event may be missing.
        assert tokens.text.startswith(shown)
        assert (tokens.finish, tokens.spans) == (None, [])
        deadline = time.monotonic() + 60
        while await counted("vllm:num_requests_running"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert 0 < await counted("vllm:generation_tokens_total") - before < 230, "the engine went on for nobody"

    engine.run(scenario())


def test_a_taken_port_is_an_error_that_says_so(engine: Engine) -> None:
    port = int(engine.url.rsplit(":", 1)[1])
    rival = VllmServer(RolloutSettings(port=port), random_version(engine.work, 0), engine.work / "rival.log")
    with pytest.raises(ServerFailed, match=r"rollout\.port"):
        engine.run(rival.start())


def test_a_killed_server_leaves_nothing_behind(engine: Engine) -> None:
    """Last in the module: the server is gone afterwards."""
    assert engine.server.pid is not None
    family = psutil.Process(engine.server.pid).children(recursive=True)
    assert len(family) >= 2
    os.kill(engine.server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family):
        assert time.monotonic() < deadline, f"still there: {family}"
        time.sleep(0.05)
    assert "exit code -9" in engine.run(engine.server.wait_ended(engine.http))
    with pytest.raises(EngineUnavailable):
        engine.run(engine_label(engine.http, engine.url))

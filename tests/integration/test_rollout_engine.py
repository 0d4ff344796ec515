"""A real vLLM server with our plugin, middleware and tool parser: tokens, log-probabilities, versions, reloads, tool calls, its end.

One server serves the whole module: starting it takes most of a minute.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from demo import model
from demo.agent import TOOLS
from rollout.errors import EngineUnavailable, InvalidWeights, ServerFailed
from rollout.server import VllmServer
from rollout.weights import engine_label, load_version
from schemas.events import WeightFile
from schemas.settings import RolloutSettings

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
class Reply:
    """One choice of a chat reply, plain or put together from a stream."""

    content: str | None
    calls: list[tuple[str, str]]
    finish_reason: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    spans: list[dict[str, Any]]


def free_port() -> int:
    """A port below the ephemeral range, so that no client connection of another test takes it meanwhile."""
    for port in range(28300, 28400):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port in 28300..28399")


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
        "logprobs": True,
        "return_token_ids": True,
        "max_tokens": 24,
        **more,
    }


async def chat(engine: Engine, body: dict[str, Any]) -> Reply:
    """Ask, in the way that body["stream"] says."""
    async with engine.http.post(f"{engine.url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        assert reply.headers["x-clawstream-version-start"]
        if body.get("stream"):
            return from_stream(await reply.text())
        answer = await reply.json()
        (spans,) = json.loads(reply.headers["x-clawstream-versions"])
    (choice,) = answer["choices"]
    message = choice["message"]
    return Reply(
        content=message["content"],
        calls=[(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []],
        finish_reason=choice["finish_reason"],
        prompt_ids=answer["prompt_token_ids"],
        ids=choice["token_ids"],
        logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
        spans=spans,
    )


def from_stream(text: str) -> Reply:
    """Put a stream together; the versions come as one comment, right before the end marker."""
    events = text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    name, _, spans = events[-2].removeprefix(": ").partition(" ")
    assert name == "clawstream-versions"
    assert not any(event.startswith(":") for event in events[:-2])
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls: dict[int, tuple[str, str]] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls") or []:
            had = calls.get(call["index"], ("", ""))
            function = call["function"]
            calls[call["index"]] = (had[0] + (function.get("name") or ""), had[1] + (function.get("arguments") or ""))
    return Reply(
        content="".join(choice["delta"].get("content") or "" for choice in choices) or None,
        calls=[calls[i] for i in sorted(calls)],
        finish_reason=next(choice["finish_reason"] for choice in choices if choice["finish_reason"]),
        prompt_ids=chunks[0]["prompt_token_ids"],
        ids=[i for choice in choices for i in choice.get("token_ids") or []],
        logprobs=[e["logprob"] for choice in choices for e in (choice["logprobs"] or {"content": []})["content"]],
        spans=json.loads(spans)[0],
    )


def logprobs_of(directory: Path, prompt: list[int], ids: list[int]) -> list[float]:
    """What transformers says in float32."""
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        table = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [float(row[i]) for row, i in zip(table, ids, strict=True)]


def worst(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def spans_cover(reply: Reply) -> bool:
    ends = [0, *(span["end"] for span in reply.spans)]
    return [s["start"] for s in reply.spans] == ends[:-1] and ends[-1] == len(reply.ids) == len(reply.logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_those_of_the_text_and_logprobs_those_of_the_model(engine: Engine, stream: bool) -> None:
    for seed in range(4):
        reply = engine.run(chat(engine, request(temperature=1.0, seed=seed, max_tokens=60, stream=stream)))
        said = reply.ids[:-1] if reply.ids[-1] == IM_END else reply.ids
        assert tokenizer.decode(said) == (reply.content or "")
        text = tokenizer.apply_chat_template(
            request()["messages"], tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        assert reply.prompt_ids == tokenizer.encode(text, add_special_tokens=False)
        label = engine.run(engine_label(engine.http, engine.url))
        assert reply.spans == [{"version": label, "start": 0, "end": len(reply.ids)}]
        assert worst(reply.logprobs, logprobs_of(random_version(engine.work, 0), reply.prompt_ids, reply.ids)) < 1e-3


def test_every_choice_and_every_endpoint_has_its_spans(engine: Engine) -> None:
    async def ask(path: str, body: dict[str, Any]) -> tuple[Any, str]:
        async with engine.http.post(f"{engine.url}{path}", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return json.loads(reply.headers.get("x-clawstream-versions", "null")), await reply.text()

    body = request(n=3, temperature=1.0, max_tokens=9)
    spans, text = engine.run(ask("/v1/chat/completions", body))
    choices = json.loads(text)["choices"]
    assert [[s["end"] for s in choice] for choice in spans] == [[len(c["token_ids"])] for c in choices]

    spans, text = engine.run(ask("/v1/chat/completions", body | {"stream": True}))
    assert spans is None
    (line,) = [line for line in text.splitlines() if line.startswith(": clawstream-versions ")]
    counted = [0, 0, 0]
    for event in text.split("\n\n"):
        if event.startswith("data: {"):
            for choice in json.loads(event[6:])["choices"]:
                counted[choice["index"]] += len(choice.get("token_ids") or [])
    assert [choice[-1]["end"] for choice in json.loads(line.split(" ", 2)[2])] == counted

    prompts = {"model": "policy", "prompt": ["k1", "k2"], "n": 2, "temperature": 1.0, "ignore_eos": True}
    spans, _ = engine.run(ask("/v1/completions", prompts | {"max_tokens": 3}))
    assert [choice[-1]["end"] for choice in spans] == [3, 3, 3, 3]

    anthropic = {"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": "k1"}], "stream": True}
    _, text = engine.run(ask("/v1/messages", anthropic))
    assert text.count(": clawstream-versions [[") == 1


def test_five_reloads_under_load_lose_nothing_and_label_every_token(engine: Engine) -> None:
    versions = {f"run/{i}.0": random_version(engine.work, i) for i in range(6)}
    replies: list[Reply] = []

    async def client(stream: bool, until: asyncio.Event) -> None:
        while not until.is_set():
            body = request(temperature=1.0, max_tokens=200, ignore_eos=True, stream=stream)
            replies.append(await chat(engine, body))

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
        seen = [order.index(span["version"]) for span in reply.spans]
        assert seen == sorted(set(seen))
    crossing = [reply for reply in replies if len(reply.spans) > 1]
    assert {span["version"] for reply in crossing for span in reply.spans} == set(order)
    # A token's log-probability is that of the version its span names, over everything before it.
    for reply in crossing[:3] + crossing[-3:]:
        for span in reply.spans:
            start, end = span["start"], span["end"]
            prefix = reply.prompt_ids + reply.ids[:start]
            expected = logprobs_of(versions[span["version"]], prefix, reply.ids[start:end])
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
    assert reply.spans == [{"version": "run/7.0", "start": 0, "end": 24}]
    assert worst(reply.logprobs, logprobs_of(good, reply.prompt_ids, reply.ids)) < 1e-3


def test_an_update_left_open_by_a_killed_worker_is_no_obstacle(engine: Engine) -> None:
    async def leave_open() -> None:
        for path in ("/start_weight_update", "/pause?mode=keep&clear_cache=true"):
            async with engine.http.post(engine.url + path) as reply:
                assert reply.status == 200

    engine.run(leave_open())
    engine.run(engine.load("run/7.1", random_version(engine.work, 2)))
    reply = engine.run(chat(engine, request(temperature=1.0, ignore_eos=True)))
    assert reply.spans == [{"version": "run/7.1", "start": 0, "end": 24}]


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


def test_streamed_and_plain_replies_give_the_same_strict_calls(engine: Engine, parrot: Path) -> None:
    engine.run(engine.load("run/9.0", parrot))
    for question, (said, calls, content) in REPLIES.items():
        for stream in (False, True):
            reply = engine.run(chat(engine, request(question, temperature=0.0, max_tokens=60, stream=stream)))
            assert tokenizer.decode(reply.ids) == said + "<|im_end|>", question
            assert (reply.calls, reply.content) == (calls, content), (question, stream)
            assert reply.finish_reason == ("tool_calls" if calls else "stop")
            assert spans_cover(reply)
            # Turn 2 starts with exactly the tokens of turn 1.
            message: dict[str, Any] = {"role": "assistant", "content": reply.content}
            if reply.calls:
                message["tool_calls"] = [
                    {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                    for i, (name, arguments) in enumerate(reply.calls)
                ]
            again = request(question, max_tokens=1)
            again["messages"] += [message, {"role": "user", "content": "price of k1"}]
            second = engine.run(chat(engine, again))
            turn = reply.prompt_ids + reply.ids
            assert second.prompt_ids[: len(turn)] == turn


def test_tools_that_must_not_be_called_are_not(engine: Engine, parrot: Path) -> None:
    engine.run(engine.load("run/9.1", parrot))
    for stream in (False, True):
        body = request("price of k1", temperature=0.0, max_tokens=60, stream=stream, tool_choice="none")
        reply = engine.run(chat(engine, body))
        assert (reply.calls, reply.content) == ([], CALL)


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
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family):
        assert time.monotonic() < deadline, f"still there: {family}"
        time.sleep(0.05)
    assert "exit code -9" in engine.run(engine.server.wait_ended(engine.http))
    with pytest.raises(EngineUnavailable):
        engine.run(engine_label(engine.http, engine.url))

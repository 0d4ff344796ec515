"""A real vLLM server with our plugin, middleware and tool parser.

The tests cover tokens, log-probabilities, versions, reloads, tool calls, and the server's end. One
server serves the whole module, because its start takes most of a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.assemble import step
from support.engine import (
    DEFAULT_TOP_K,
    IM_END,
    WIRES,
    Engine,
    captured,
    chat,
    comparable,
    folded,
    logprobs_of,
    manifest,
    post,
    random_version,
    rendered,
    request,
    seen_by_index,
    serving,
    spans_cover,
    taught,
    tokenizer,
    worst,
)
from support.in_flight import counted, reloaded_under_load, worst_of_spans
from support.patience import Patience, until

from clawstream.demo.model import make_random_model
from clawstream.demo.task import TOOLS
from clawstream.rollout.errors import EngineChanged, EngineUnavailable, InvalidWeights
from clawstream.rollout.server.load_weights import engine_label, load_version
from clawstream.rollout.server.process import VllmServer
from clawstream.rollout.vllm_plugin.token_capture import BEAM_SEARCH
from clawstream.rollout.vllm_plugin.weight_loader import PATH
from clawstream.runtime.digests import sha256
from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.process.ports import PortTaken
from clawstream.runtime.weights.delta import Snapshot, mapped, write_delta
from clawstream.runtime.weights.files import get_files
from clawstream.schemas import engine_frames
from clawstream.schemas.records import Sampling, WeightFile
from clawstream.schemas.settings import RolloutSettings, TrainerSettings
from clawstream.schemas.tokens import pack_logprobs
from clawstream.stream_jobs.assemble.payload.trainability import trainability
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.data.sequences import Tokens, TrainingSequence
from clawstream.trainer.model.policy import Policy


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with serving(tmp_path_factory.mktemp("rollout")) as engine:
        yield engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WIRES)
def test_tokens_are_those_of_the_text_and_logprobs_those_of_the_model(
    engine: Engine, name: str, stream: bool
) -> None:
    wire, question = WIRES[name], "price of k374 plus 2?"
    for seed in range(2):
        body = {"model": "policy", "temperature": 1.0, "seed": seed, "stream": stream} | wire.body(
            question, False
        )
        told = engine.run(captured(engine, wire.path, body))
        (tokens,) = told.choices.values()
        content, calls, _ = wire.read(told.own, stream)
        said = (
            tokenizer.decode(tokens.ids).removesuffix("<|im_end|>")
            if name == "messages"
            else tokens.text
        )
        assert (content or "", calls) == (said, [])
        assert tokenizer.decode(tokens.prompt_ids) == (
            question if name == "completions" else rendered(question, None)
        )
        assert tokens.finish == ("stop" if tokens.ids[-1] == IM_END else "length")
        assert tokens.spans == [
            (engine.run(engine_label(engine.http, engine.url)), 0, len(tokens.ids))
        ]
        assert len(tokens.logprobs) == len(tokens.ids)
        expected = logprobs_of(random_version(engine.work, 0), tokens.prompt_ids, tokens.ids)
        assert worst(tokens.logprobs, expected) < 1e-3


def test_what_the_engine_applied_is_told_with_its_own_defaults(engine: Engine) -> None:
    neutral = Sampling(
        source="engine", temperature=1.0, top_p=1.0, top_k=DEFAULT_TOP_K, min_p=0.0,
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip

    def told(name: str, **more: Any) -> Sampling | None:
        body = {"model": "policy"} | WIRES[name].body("k1", False) | more
        (choice,) = engine.run(captured(engine, WIRES[name].path, body)).choices.values()
        return choice.sampling

    assert [told(name) for name in WIRES] == [neutral] * len(WIRES)
    assert told("responses", temperature=0.7, stream=True) == replace(neutral, temperature=0.7)
    shaped = {
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    shaped |= {"repetition_penalty": 1.5}
    limits = {"logit_bias": {"5": 1.0}, "min_tokens": 2}
    assert told("chat", **shaped, **limits) == replace(
        neutral, **shaped, constraints=("logit_bias", "min_tokens")
    )
    assert told("chat", temperature=0.0, **shaped) == replace(
        neutral, temperature=0.0, **shaped | {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.3, 0.0])
def test_the_trainer_scores_tokens_as_the_engine_did(engine: Engine, temperature: float) -> None:
    """Compare the engine's log-probabilities with the trainer's.

    The tokens pass from the frames of a real engine through the fold's own decision to the trainer.
    """
    policy = Policy(
        random_version(engine.work, 0), TrainerSettings.model_validate({"device": "cpu"})
    )
    for seed in range(3):
        body = request(temperature=temperature, top_k=0, seed=seed, ignore_eos=True)
        tokens = engine.run(chat(engine, body)).tokens
        sampled = step(
            "k",
            0,
            tokens.prompt_ids,
            tokens.ids,
            response_logprobs=pack_logprobs(tokens.logprobs),
            sampling=tokens.sampling,
        )
        found = trainability(sampled)
        assert found.reason is None and found.logprobs_temperature is not None
        ids = np.array([*tokens.prompt_ids, *tokens.ids], np.int32)
        prompt, unknown = len(tokens.prompt_ids), np.full(len(ids), None, object)
        row = Tokens(
            ids=ids,
            mask=np.arange(len(ids)) >= prompt,
            logprobs=np.array([0.0] * prompt + list(tokens.logprobs), np.float32),
            temperatures=np.full(len(ids), found.logprobs_temperature, np.float32),
            versions=unknown,
            steps=np.zeros(len(ids), np.int32),
        )
        advantages = np.ones(len(tokens.ids), np.float32)
        with torch.no_grad():
            scored, at_one = (
                policy.logprobs(
                    collate([TrainingSequence("k", of, advantages)], 1.0, policy.device)
                ).tolist()
                for of in (row, row._replace(temperatures=np.full(len(ids), 1.0, np.float32)))
            )
        assert worst(tokens.logprobs, scored) < 1e-3
        assert (worst(tokens.logprobs, at_one) < 1e-3) == (temperature in (0.0, 1.0))


def test_every_choice_of_every_prompt_has_its_tokens(engine: Engine) -> None:
    for stream in (False, True):
        body = request(n=3, temperature=1.0, max_tokens=9, stream=stream, tools=None)
        told = engine.run(captured(engine, "/v1/chat/completions", body))
        assert seen_by_index(told.own) == {which: c.text for (_, which), c in told.choices.items()}
        assert {c.finish for c in told.choices.values()} <= {"stop", "length"}
        assert len(told.choices) == 3

        body = {
            "model": "policy",
            "prompt": ["k1", "k2", "k3"],
            "n": 2,
            "temperature": 1.0,
            "max_tokens": 9,
        }
        told = engine.run(captured(engine, "/v1/completions", body | {"stream": stream}))
        assert seen_by_index(told.own) == {
            2 * g + which: c.text for (g, which), c in told.choices.items()
        }
        for (generation, _), choice in told.choices.items():
            assert tokenizer.decode(choice.prompt_ids) == body["prompt"][generation]
            assert spans_cover(choice)
        assert len(told.choices) == 6


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
        async with engine.http.get(
            f"{engine.url}/version", headers={engine_frames.ASK: "1"}
        ) as reply:
            assert reply.headers[engine_frames.ASK] == "1"
            assert engine_frames.OWN_BODY not in reply.headers
            assert set(await reply.json()) == {"version"}
        async with engine.http.get(f"{engine.url}/version") as reply:
            assert engine_frames.ASK not in reply.headers

    engine.run(probe())


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
        # With one candidate token the sampling is deterministic, and the engine uses the same code
        # path as for any other sampling.
        body = (
            {"model": "policy", "temperature": 1.0, "top_k": 1, "stream": stream}
            | wire.body("k1", tools)
            | more
        )
        if not stream:
            body.pop("stream_options", None)
        _, without = engine.run(post(engine, wire.path, body, **id_))
        told = engine.run(captured(engine, wire.path, body, **id_))
        assert comparable(wire, told.own, stream) == comparable(wire, without, stream)
        assert told.choices


def test_five_reloads_under_load_lose_nothing_and_label_every_token(engine: Engine) -> None:
    versions = {f"run/{i}.0": random_version(engine.work, i) for i in range(6)}
    replies, _ = reloaded_under_load(engine, versions, tokens_between=300)
    crossing = [reply for reply in replies if len(reply.spans) > 1]
    assert {version for reply in crossing for version, _, _ in reply.spans} == set(versions)
    assert worst_of_spans(crossing[:3] + crossing[-3:], versions) < 1e-3


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
    ("damage", "after_publishing", "error", "reason"),
    [
        (break_file, True, WeightsUnreadable, "sha256"),
        (
            lambda files: (files / "model.safetensors").unlink(),
            True,
            WeightsUnreadable,
            "No such file",
        ),
        (
            lambda files: (files / "model.safetensors").write_bytes(b"\x08"),
            False,
            WeightsUnreadable,
            "deserializ",
        ),
        (
            rewrite(lambda t: t.pop("model.norm.weight")),
            False,
            InvalidWeights,
            "missing: model.norm.weight",
        ),
        (rewrite(lambda t: t.update(more=torch.zeros(1))), False, InvalidWeights, "unknown: more"),
        (
            rewrite(lambda t: t.update({"lm_head.weight": t["lm_head.weight"][1:].clone()})),
            False,
            InvalidWeights,
            "dtype or shape",
        ),
        (
            rewrite(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].int()})),
            False,
            InvalidWeights,
            "dtype or shape",
        ),
        (
            rewrite(lambda t: t["model.norm.weight"].fill_(float("nan"))),
            False,
            InvalidWeights,
            "not finite",
        ),
    ],
)
def test_a_bad_version_is_refused_and_the_old_one_serves_on(
    engine: Engine,
    tmp_path: Path,
    damage: Callable[[Path], None],
    after_publishing: bool,
    error: type[Exception],
    reason: str,
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
    with pytest.raises(error, match=reason):
        engine.run(load_version(engine.http, engine.url, "run/8.0", files, engine.work, "run/7.0"))
    reply = engine.run(chat(engine, request(temperature=1.0, ignore_eos=True)))
    assert reply.tokens.spans == [("run/7.0", 0, 24)]
    assert (
        worst(reply.tokens.logprobs, logprobs_of(good, reply.tokens.prompt_ids, reply.tokens.ids))
        < 1e-3
    )


def changed_a_little(base: Path, directory: Path) -> Path:
    """Write a version that differs from the base in a percent of the elements of each tensor."""
    shutil.copytree(base, directory)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(base / "model.safetensors")
    for tensor in tensors.values():
        tensor[torch.rand(tensor.shape, generator=generator) < 0.01] *= 1.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def delta_manifest(base: Path, new: Path, delta: Path) -> list[WeightFile]:
    """Return the manifest of a delta version. delta: an empty directory for its file."""
    delta.mkdir()
    (file,) = mapped(base)
    snapshot = Snapshot(mapped(base), {file: sha256(base / file)})
    with (delta / "model.delta").open("wb") as target:
        assert write_delta(snapshot, mapped(new), target) is not None
    return [*manifest(base), *manifest(delta)]


def test_a_delta_is_loaded_and_damaged_ones_leave_it_serving(
    engine: Engine, tmp_path: Path
) -> None:
    versions = [random_version(engine.work, 0)]
    for number in (1, 2):
        versions.append(changed_a_little(versions[-1], tmp_path / str(number)))
    files = delta_manifest(versions[0], versions[1], tmp_path / "d1")
    next_files = [*files, delta_manifest(versions[1], versions[2], tmp_path / "d2")[-1]]
    path = tmp_path / "d2" / "model.delta"
    whole = path.read_bytes()

    def load(name: str, files: Sequence[WeightFile], served: str) -> None:
        engine.run(load_version(engine.http, engine.url, name, files, tmp_path / "cache", served))

    def assert_serves(name: str, directory: Path) -> None:
        reply = engine.run(chat(engine, request(temperature=1.0, ignore_eos=True))).tokens
        assert reply.spans == [(name, 0, 24)]
        expected = logprobs_of(directory, reply.prompt_ids, reply.ids)
        assert worst(reply.logprobs, expected) < 1e-3

    load("run/9.0", files, engine.run(engine_label(engine.http, engine.url)))
    assert_serves("run/9.0", versions[1])
    for damaged in (whole[:-1], b"?" + whole[1:]):  # also by whoever wrote the manifest
        path.write_bytes(damaged)
        for manifested in (next_files, [*files, *manifest(path.parent)]):
            with pytest.raises(WeightsUnreadable):
                load("run/9.1", manifested, "run/9.0")
    path.unlink()
    with pytest.raises(WeightsUnreadable, match="No such file"):
        load("run/9.1", next_files, "run/9.0")
    path.write_bytes(whole)
    with pytest.raises(WeightsUnreadable, match="is not the base of"):
        shutil.rmtree(tmp_path / "cache")
        load("run/9.1", [*files[:-1], next_files[-1]], "run/9.0")
    assert_serves("run/9.0", versions[1])
    load("run/9.1", next_files, "run/9.0")
    assert_serves("run/9.1", versions[2])


def test_a_version_in_another_float_dtype_is_cast_as_it_is_loaded(engine: Engine) -> None:
    """The engine serves float32.

    Every bfloat16 value is also a float32 value, so the engine serves exactly the file's values.
    """
    rounded = make_random_model(engine.work / "rounded", 3, "bfloat16")
    engine.run(engine.load("run/7.2", rounded))
    reply = engine.run(chat(engine, request(temperature=1.0, ignore_eos=True)))
    assert reply.tokens.spans == [("run/7.2", 0, 24)]
    assert (
        worst(
            reply.tokens.logprobs, logprobs_of(rounded, reply.tokens.prompt_ids, reply.tokens.ids)
        )
        < 1e-3
    )


def test_of_two_workers_on_one_engine_one_loads_and_the_other_is_told(
    engine: Engine, tmp_path: Path
) -> None:
    async def race() -> list[object]:
        await engine.load("run/7.1", random_version(engine.work, 0))
        loads = [
            load_version(
                engine.http,
                engine.url,
                name,
                manifest(random_version(engine.work, i)),
                tmp_path,
                "run/7.1",
            )
            for i, name in ((1, "run/7.2"), (2, "theirs/0.0"))
        ]
        return await asyncio.gather(*loads, return_exceptions=True)

    outcomes = engine.run(race())
    (changed,) = [outcome for outcome in outcomes if isinstance(outcome, EngineChanged)]
    label = engine.run(engine_label(engine.http, engine.url))
    assert changed.label == label
    reply = engine.run(chat(engine, request(temperature=1.0, ignore_eos=True)))
    assert reply.tokens.spans == [(label, 0, 24)]
    weights = random_version(engine.work, 1 if label == "run/7.2" else 2)
    assert (
        worst(
            reply.tokens.logprobs, logprobs_of(weights, reply.tokens.prompt_ids, reply.tokens.ids)
        )
        < 1e-3
    )


def test_a_load_goes_on_when_its_worker_is_killed(engine: Engine, tmp_path: Path) -> None:
    async def asked_and_gone() -> str:
        await engine.load("run/7.3", random_version(engine.work, 0))
        verified = get_files(manifest(random_version(engine.work, 1)), tmp_path)
        files = [str(path) for path in verified if path.suffix == ".safetensors"]
        body = json.dumps({"version_id": "run/7.4", "served": "run/7.3", "files": files}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
        head = f"POST {PATH} HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(120):
            while (  # noqa: ASYNC110 - another process
                label := await engine_label(engine.http, engine.url)
            ) != "run/7.4":
                await asyncio.sleep(0.02)
        return label

    assert engine.run(asked_and_gone()) == "run/7.4"
    reply = engine.run(chat(engine, request(temperature=1.0, ignore_eos=True)))
    assert reply.tokens.spans == [("run/7.4", 0, 24)]


CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "k1"}}</tool_call>'
REPLIES = {
    "price of k1": (CALL, [("lookup", '{"key": "k1"}')], None),
    "price of k2": (CALL + CALL, [("lookup", '{"key": "k1"}')] * 2, None),
    "price of k3": ("error" + CALL, [("lookup", '{"key": "k1"}')], "error"),
    "price of k4": ("the total is 7.", [], "the total is 7."),
    # Lenient parsers read these as calls.
    "price of k5": (CALL.removesuffix("</tool_call>"), [], CALL.removesuffix("</tool_call>")),
    "price of k6": (CALL + "error", [], CALL + "error"),
    "price of k7": ("<tool_call></tool_call>", [], "<tool_call></tool_call>"),
}


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that has memorised these replies."""
    return taught(
        tmp_path_factory.mktemp("parrot"),
        {question: said for question, (said, _, _) in REPLIES.items()},
    )


FINISHES = {
    "chat": ("tool_calls", "stop"),
    "responses": ("completed", "completed"),
    "messages": ("tool_use", "end_turn"),
}


@pytest.mark.parametrize("name", FINISHES)
def test_streamed_and_plain_replies_give_the_same_strict_calls(
    engine: Engine, parrot: Path, name: str
) -> None:
    engine.run(engine.load(f"run/9.{list(FINISHES).index(name)}", parrot))
    wire = WIRES[name]
    for question, (said, calls, content) in REPLIES.items():
        for stream in (False, True):
            body = {"model": "policy", "temperature": 0.0, "stream": stream} | wire.body(
                question, True
            )
            told = engine.run(captured(engine, wire.path, body))
            tokens = told.choices[0, 0]
            assert tokenizer.decode(tokens.prompt_ids) == rendered(question, TOOLS)
            assert tokenizer.decode(tokens.ids) == said + "<|im_end|>", question
            assert wire.read(told.own, stream) == (
                content,
                calls,
                FINISHES[name][0 if calls else 1],
            ), (
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
                {
                    "id": f"c{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
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
        body = request(
            "price of k1", temperature=0.0, max_tokens=60, stream=stream, tool_choice="none"
        )
        reply = engine.run(chat(engine, body))
        assert (reply.calls, reply.content) == ([], CALL)


def test_a_client_that_leaves_stops_the_engine(engine: Engine) -> None:
    async def leave() -> bool:
        """Leave a stream; return whether the engine stopped before the end of the reply.

        If it did, all values must be as they are for a client that left.
        """
        before = await counted(engine, "vllm:generation_tokens_total")
        body = request(max_tokens=230, ignore_eos=True, stream=True, tools=None)
        headers, url = {engine_frames.ASK: "1"}, f"{engine.url}/v1/chat/completions"
        async with engine.http.post(url, json=body, headers=headers) as reply:
            events = [await reply.content.readuntil(b"\n\n") for _ in range(8)]
            reply.close()
        frames = [
            frame
            for event in events
            if engine_frames.is_comment(event)
            for frame in engine_frames.read_comment(event)
        ]
        told = folded(
            b"".join(event for event in events if not engine_frames.is_comment(event)), frames
        )
        (tokens,) = told.choices.values()
        shown = seen_by_index(told.own)[0]
        # The capture has all shown text; the event of the last comment may be missing.
        assert tokens.text.startswith(shown)
        patience = Patience()
        while await counted(engine, "vllm:num_requests_running"):
            patience.check("the engine ends the request")
            await asyncio.sleep(0.05)
        sampled = await counted(engine, "vllm:generation_tokens_total") - before
        if tokens.finish is not None or sampled == 230:
            return False
        assert shown and tokens.spans == []
        return 0 < sampled < 230

    # A busy machine may run this process again only after the engine has finished.
    assert any(engine.run(leave()) for _ in range(20)), "the engine went on for nobody"


def test_a_taken_port_is_an_error_that_says_so(engine: Engine) -> None:
    port = int(engine.url.rsplit(":", 1)[1])
    rival = VllmServer(
        RolloutSettings(port=port), random_version(engine.work, 0), engine.work / "rival.log"
    )
    with pytest.raises(PortTaken, match=r"rollout\.port"):
        engine.run(rival.start())


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it has ended since
        return False


def test_a_killed_server_leaves_nothing_behind(engine: Engine) -> None:
    """Last in the module: the server is gone afterwards."""
    assert engine.server.pid is not None
    family = psutil.Process(engine.server.pid).children(recursive=True)
    assert len(family) >= 2
    os.kill(engine.server.pid, signal.SIGKILL)
    until(lambda: not any(lives(p) for p in family), f"still there: {family}")
    assert "exit code -9" in engine.run(engine.server.wait_ended(engine.http))
    with pytest.raises(EngineUnavailable):
        engine.run(engine_label(engine.http, engine.url))

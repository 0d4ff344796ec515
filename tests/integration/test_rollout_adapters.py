"""LoRA versions on a real vLLM: loaded while it samples, and sampled exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.engine import Engine, Sampled, chat, manifest, random_version, request, serving, worst
from transformers import AutoModelForCausalLM

from clawstream.rollout.errors import EngineUnavailable, InvalidWeights
from clawstream.rollout.server.load_weights import engine_label, load_version
from clawstream.rollout.server.weight_files import ADAPTERS, remove_others
from clawstream.runtime.digests import digest_of_model
from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.model.files import TensorDtypes
from clawstream.trainer.model.lora import CONFIG, WEIGHTS
from clawstream.trainer.model.policy import Policy

RANK = 4
VERSIONS = [f"run/{i}.0" for i in range(5)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with serving(tmp_path_factory.mktemp("adapters"), RANK) as engine:
        yield engine


@pytest.fixture(scope="module")
def adapters(engine: Engine) -> dict[str, Path]:
    """Return the directory of each version, as the trainer publishes it."""
    settings = TrainerSettings.model_validate({"device": "cpu", "lora": {"rank": RANK}})
    policy = Policy(random_version(engine.work, 0), settings)
    found = {}
    for i, version in enumerate(VERSIONS):
        found[version] = engine.work / "published" / str(i)
        policy.save(found[version], TensorDtypes(torch.float32, {}))
        with torch.no_grad():
            for parameter in policy.trained:
                parameter += 0.05 * torch.randn_like(parameter)
    return found


async def load(engine: Engine, version: str, directory: Path, base: str | None = None) -> list[str]:
    """Load an adapter as the worker does; return the versions that the engine holds."""
    served = await engine_label(engine.http, engine.url)
    base = base or digest_of_model(random_version(engine.work, 0))
    files, cache = manifest(directory), engine.work / "worker"
    result = await load_version(engine.http, engine.url, version, files, cache, served, base)
    remove_others(result.digests, result.held, cache)
    return list(result.held)


def logprobs_of(base: Path, adapter: Path, reply: Sampled) -> list[float]:
    """Return the log-probabilities that peft computes in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        logits = model(torch.tensor([reply.prompt_ids + reply.ids])).logits[0]
    table = logits[len(reply.prompt_ids) - 1 : -1].log_softmax(-1)
    return [float(row[i]) for row, i in zip(table, reply.ids, strict=True)]


def test_adapters_are_loaded_under_load_and_every_reply_is_of_one_version(
    engine: Engine, adapters: dict[str, Path]
) -> None:
    replies: list[Sampled] = []

    async def client(number: int, until: asyncio.Event) -> None:
        while not until.is_set():
            body = request(temperature=1.0, max_tokens=60 + 8 * number, ignore_eos=True)
            replies.append((await chat(engine, body | {"stream": number % 2 == 0})).tokens)

    async def load_when_one_is_free(version: str) -> list[str]:
        while True:
            try:
                return await load(engine, version, adapters[version])
            except EngineUnavailable as error:
                assert "have requests in flight" in str(error)
                await asyncio.sleep(0.05)

    async def scenario() -> None:
        ended = asyncio.Event()
        await load_when_one_is_free(VERSIONS[0])
        async with asyncio.TaskGroup() as clients:
            for i in range(8):
                clients.create_task(client(i, ended))
            for version in VERSIONS[1:]:
                before = len(replies)
                async with asyncio.timeout(300):
                    while len(replies) < before + 8:  # noqa: ASYNC110 - the clients fill it
                        await asyncio.sleep(0.02)
                held = await load_when_one_is_free(version)
                assert held[-1] == version and len(held) <= 3
                copies = engine.work / "worker" / ADAPTERS
                assert {path.name.replace("@", "/") for path in copies.iterdir()} == set(held)
                assert await engine_label(engine.http, engine.url) == version
            ended.set()
        replies.append((await chat(engine, request(temperature=1.0))).tokens)

    engine.run(scenario())
    by_version: dict[str, Sampled] = {}
    for reply in replies:
        ((version, start, end),) = reply.spans
        assert (start, end) == (0, len(reply.ids))
        by_version[version] = reply
    assert set(by_version) == set(VERSIONS)
    base = random_version(engine.work, 0)
    for version, reply in by_version.items():
        assert worst(reply.logprobs, logprobs_of(base, adapters[version], reply)) < 1e-3
    first, last = by_version[VERSIONS[0]], by_version[VERSIONS[-1]]
    assert worst(first.logprobs, logprobs_of(base, adapters[VERSIONS[-1]], first)) > 1e-2
    assert first.prompt_ids == last.prompt_ids  # the cached prefix of another version is not used


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_serves_on(
    engine: Engine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidWeights, match="an adapter of another model"):
            await load(engine, "run/9.0", adapters[VERSIONS[0]], "0" * 64)
        tensors = load_file(adapters[VERSIONS[0]] / WEIGHTS)
        for file in adapters[VERSIONS[0]].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        name = next(iter(tensors))
        save_file(tensors | {name: tensors[name] * float("nan")}, tmp_path / WEIGHTS)
        with pytest.raises(InvalidWeights, match="not finite"):
            await load(engine, "run/9.0", tmp_path)
        save_file(tensors, tmp_path / WEIGHTS)
        config = json.loads((tmp_path / CONFIG).read_text())
        (tmp_path / CONFIG).write_text(json.dumps(config | {"r": 64}))
        with pytest.raises(InvalidWeights, match="rank 64 is greater"):
            await load(engine, "run/9.0", tmp_path)
        label = await engine_label(engine.http, engine.url)
        with pytest.raises(InvalidWeights, match="adapters only"):
            await engine.load("run/9.0", random_version(engine.work, 1))
        reply = (await chat(engine, request(temperature=1.0))).tokens
        assert [version for version, _, _ in reply.spans] == [label]

    engine.run(scenario())

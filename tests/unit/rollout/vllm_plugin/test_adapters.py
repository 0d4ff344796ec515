"""Which adapter a generation uses, and when an adapter is unloaded, on a client as vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from clawstream.rollout.errors import InvalidWeights
from clawstream.rollout.vllm_plugin.adapters import BOOT_LABEL, Adapters, AdaptersBusy
from clawstream.runtime.digests import digest_of_model
from clawstream.runtime.errors import WeightsUnreadable

SLOTS = 2


class Request(NamedTuple):
    """As vLLM's LoRARequest; importing vLLM would take seconds."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Choice:
    weight_versions: list[Span] | None


@dataclass
class Output:
    outputs: list[Choice]


@dataclass
class LoraConfig:
    max_loras: int = SLOTS


@dataclass
class VllmConfig:
    lora_config: LoraConfig | None = field(default_factory=LoraConfig)


@dataclass
class ModelConfig:
    model: str
    dtype: torch.dtype = torch.float32


@dataclass
class Client:
    """vLLM's engine client: a generation yields once before and once after `go_on`."""

    model_config: ModelConfig
    vllm_config: VllmConfig = field(default_factory=VllmConfig)
    loaded: list[Request] = field(default_factory=list)
    used: list[str | None] = field(default_factory=list)
    label: str = BOOT_LABEL
    refused: str | None = None
    errored: bool = False
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, lora_request: Request | None = None
    ) -> AsyncIterator[Output]:
        self.used.append(lora_request.lora_name if lora_request else None)
        yield Output([Choice(None)])
        await self.go_on.wait()
        yield Output([Choice([Span("the label of", 0, 2), Span("each moment", 2, 5)])])

    async def add_lora(self, request: Request) -> bool:
        if self.refused is not None:
            raise RuntimeError(self.refused)
        self.loaded.append(request)
        assert len(self.loaded) <= SLOTS
        return True

    async def remove_lora(self, number: int) -> bool:
        self.loaded = [request for request in self.loaded if request.lora_int_id != number]
        return True

    async def update_weight_version(self, version: str) -> None:
        self.label = version


@pytest.fixture
def client(tmp_path: Path) -> Client:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    return Client(ModelConfig(str(tmp_path)))


def files(directory: Path, value: float = 1.0) -> list[str]:
    directory.mkdir(exist_ok=True)
    save_file({"a": torch.tensor([value])}, directory / "adapter_model.safetensors")
    return [str(path) for path in directory.iterdir()]


def test_a_generation_ends_with_the_adapter_it_began_with(client: Client, tmp_path: Path) -> None:
    async def scenario() -> None:
        adapters, base = Adapters(client, Request), digest_of_model(tmp_path)

        async def generate() -> list[Span]:
            last: list[Span] = []
            async for output in client.generate("prompt", None, "id"):
                last = output.outputs[0].weight_versions or last
            return last

        async def begin() -> asyncio.Task[list[Span]]:
            count, task = len(client.used), asyncio.create_task(generate())
            while len(client.used) == count:  # noqa: ASYNC110 - the task's first steps
                await asyncio.sleep(0)
            return task

        before = await begin()
        running = []
        for version in ("r/0.0", "r/1.0"):
            await adapters.load(version, files(tmp_path / version.replace("/", "-")), base)
            assert client.label == version
            running.append(await begin())
        with pytest.raises(AdaptersBusy, match=r"all 2 adapters .*r/0\.0"):
            await adapters.load("r/2.0", files(tmp_path / "two"), base)
        assert adapters.held == ["r/0.0", "r/1.0"] and client.label == "r/1.0"
        client.go_on.set()
        assert await before == [Span(BOOT_LABEL, 0, 5)]
        assert [await task for task in running] == [[Span("r/0.0", 0, 5)], [Span("r/1.0", 0, 5)]]
        await adapters.load("r/2.0", files(tmp_path / "two"), base)
        assert adapters.held == ["r/1.0", "r/2.0"]
        assert await (await begin()) == [Span("r/2.0", 0, 5)]
        assert client.used == [None, "policy@r/0.0", "policy@r/1.0", "policy@r/2.0"]
        numbers = [request.lora_int_id for request in client.loaded]
        assert len(set(numbers)) == len(numbers)

    asyncio.run(scenario())


def test_an_adapter_that_is_refused_changes_nothing(client: Client, tmp_path: Path) -> None:
    async def scenario() -> None:
        adapters, base = Adapters(client, Request), digest_of_model(tmp_path)
        good = files(tmp_path / "good")
        await adapters.load("r/0.0", good, base)
        with pytest.raises(InvalidWeights, match="an adapter of another model"):
            await adapters.load("r/1.0", good, "0" * 64)
        with pytest.raises(InvalidWeights, match="not finite"):
            await adapters.load("r/1.0", files(tmp_path / "nan", float("nan")), base)
        missing = str(tmp_path / "missing.safetensors")
        with pytest.raises(WeightsUnreadable, match="missing"):
            await adapters.load("r/1.0", [missing], base)
        client.refused = "rank 64 is greater than 8"
        with pytest.raises(InvalidWeights, match="rank 64"):
            await adapters.load("r/1.0", good, base)
        client.errored = True
        with pytest.raises(RuntimeError, match="rank 64"):  # a dead engine refuses everything
            await adapters.load("r/1.0", good, base)
        assert (adapters.held, client.label) == (["r/0.0"], "r/0.0")

    asyncio.run(scenario())


def test_an_engine_without_adapters_is_left_alone(client: Client, tmp_path: Path) -> None:
    client.vllm_config = VllmConfig(None)
    generate = client.generate
    adapters = Adapters(client, Request)
    assert client.generate == generate and not adapters.enabled
    with pytest.raises(InvalidWeights, match="without --enable-lora"):
        asyncio.run(adapters.load("r/0.0", files(tmp_path / "a"), digest_of_model(tmp_path)))

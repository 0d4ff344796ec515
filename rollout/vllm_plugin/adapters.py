"""LoRA adapters inside vLLM's API server: each version is an adapter with a name of its own.

1. A load adds the adapter `policy@VERSION` to the engine. Generations that begin later use it;
   those in flight finish with the adapter they began with, so no request is paused.
2. At the next load, adapters without a generation in flight are unloaded. The engine holds at most
   `--max-loras` adapters, so it never evicts one that it would have to read from disk again. While
   all of them are in use, a load is refused and repeated later.
3. No adapter is replaced in place: the prefix cache tells adapters apart by name and path only.

Clients ask for the served model name; they never see the names of adapters. Nothing here imports
vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clawstream.rollout.errors import InvalidWeights
from clawstream.rollout.vllm_plugin.engine import adapter_request, check_finite
from clawstream.runtime.digests import digest_of_model
from clawstream.runtime.errors import WeightsUnreadable

BOOT_LABEL = "default"
"""vLLM's label before the first load."""
_ATTRIBUTE = "clawstream_adapters"


class AdaptersBusy(Exception):
    """All adapters of the engine have generations in flight."""


@dataclass(eq=False)
class Adapter:
    """A loaded adapter. request: vLLM's LoRARequest; None: the boot weights alone."""

    version: str
    request: Any
    in_flight: int = 0


class Adapters:
    """The adapters of an engine. It wraps `generate` of the engine client, if LoRA is enabled."""

    def __init__(
        self, client: Any, make_request: Callable[[str, int, str], Any] = adapter_request
    ) -> None:
        self._client, self._make_request = client, make_request
        config = getattr(getattr(client, "vllm_config", None), "lora_config", None)
        self._slots: int = config.max_loras if config is not None else 0
        self._current = Adapter(BOOT_LABEL, None)
        self._loaded: list[Adapter] = []
        self._numbers = 0
        self._base_model: str | None = None
        if self.enabled:
            self._generate = client.generate
            client.generate = self.generate

    @property
    def enabled(self) -> bool:
        """Whether the engine runs with --enable-lora."""
        return self._slots > 0

    @property
    def held(self) -> list[str]:
        """The versions whose adapters the engine holds."""
        return [adapter.version for adapter in self._loaded]

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncIterator[Any]:
        """Generate with the newest adapter; every token belongs to its version."""
        adapter = self._current
        more["lora_request"] = adapter.request
        adapter.in_flight += 1
        try:
            async with aclosing(
                self._generate(prompt, sampling_params, request_id, **more)
            ) as outputs:
                async for output in outputs:
                    for choice in output.outputs:
                        if spans := choice.weight_versions:
                            # vLLM labels by the time of sampling; the adapter stays the same.
                            span = replace(spans[-1], version=adapter.version, start=0)
                            choice.weight_versions = [span]
                    yield output
        finally:
            adapter.in_flight -= 1

    async def load(self, version: str, files: Sequence[str], base_model: str) -> None:
        """Load the adapter of a version; generations that begin from now on use it.

        Args:
            version: id of the version.
            files: path of each file; all in one directory of this version alone.
            base_model: digest of the model that the adapter belongs to.

        Raises:
            InvalidWeights: the adapter does not fit; nothing has changed.
            WeightsUnreadable: a file is missing or damaged; nothing has changed.
            AdaptersBusy: try again later; nothing has changed.
        """
        if not self.enabled:
            raise InvalidWeights(
                "an adapter, but the engine runs without --enable-lora: set trainer.lora.rank "
                "where the worker starts"
            )
        await self._check_base(base_model)
        await asyncio.to_thread(_check_files, files, self._client.model_config.dtype)
        await self._unload_idle()
        if len(self._loaded) == self._slots:
            raise AdaptersBusy(f"all {self._slots} adapters have requests in flight: {self.held}")
        self._numbers += 1
        directory = str(Path(files[0]).parent)
        request = self._make_request(f"policy@{version}", self._numbers, directory)
        try:
            await self._client.add_lora(request)
        # vLLM raises many kinds of errors for an adapter that it cannot load.
        except Exception as error:
            if self._client.errored:
                raise
            raise InvalidWeights(str(error)) from error
        adapter = Adapter(version, request)
        self._loaded.append(adapter)
        await self._client.update_weight_version(version)
        self._current = adapter

    async def _check_base(self, base_model: str) -> None:
        directory = Path(self._client.model_config.model)
        if self._base_model is None:
            try:
                self._base_model = await asyncio.to_thread(digest_of_model, directory)
            except FileNotFoundError as error:
                raise InvalidWeights(str(error)) from error
        if base_model != self._base_model:
            raise InvalidWeights(
                f"an adapter of another model: its base has digest {base_model}, the weights in "
                f"{directory} have {self._base_model}; start the engine with the model of "
                "trainer.model_path"
            )

    async def _unload_idle(self) -> None:
        for adapter in self._loaded[:]:
            if adapter is not self._current and not adapter.in_flight:
                await self._client.remove_lora(adapter.request.lora_int_id)
                self._loaded.remove(adapter)


def _check_files(files: Sequence[str], dtype: Any) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load

    for path in files:
        try:
            data = Path(path).read_bytes()
            tensors = load(data) if path.endswith(".safetensors") else {}
        except (OSError, ValueError, SafetensorError) as error:
            raise WeightsUnreadable(f"{path}: {error}") from error
        check_finite(tensors, dtype)


def adapters_of(client: Any) -> Adapters:
    """Return the adapters of an engine client.

    The first call wraps `generate`. Token capture calls it before it wraps `generate` itself, so it
    sees the versions that this module gives.
    """
    found = getattr(client, _ATTRIBUTE, None)
    if found is None:
        found = Adapters(client)
        setattr(client, _ATTRIBUTE, found)
    assert isinstance(found, Adapters)
    return found

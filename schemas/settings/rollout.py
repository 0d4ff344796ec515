"""The rollout worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from clawstream.schemas.settings.base import Count, Port, Positive, Secret, Section

ENGINE_STOP_S = 10.0
"""Seconds an engine may take to exit before SIGKILL; the worker's own exit gets one more."""


class RolloutSettings(Section):
    """A rollout worker and its vLLM server."""

    mode: Literal["async", "sync"] = Field(
        "async",
        description="sync: only the newest version may sample, and training waits for its batches; "
        "slower, without stale samples",
    )
    workers: Count = Field(
        1, description="engines that `clawstream up` runs, on the ports from rollout.port on"
    )
    gpus: tuple[str, ...] = Field(
        (), description='CUDA_VISIBLE_DEVICES of each worker: [0, 1], or ["0,1", "2,3"]'
    )
    worker_id: str = Field(
        "worker", description="workers on several machines; of several, each gets a number after it"
    )
    attach_urls: Annotated[tuple[str, ...], Secret("all")] = Field(
        (), description="URL of a running vLLM server for each worker, instead of starting one"
    )
    model_path: Path | None = Field(
        None, description="directory of the engine's initial weights; default trainer.model_path"
    )
    host: str = Field("127.0.0.1", description="gateways on other machines")
    port: Port = Field(8200, description="the port is taken")
    public_url: str | None = Field(
        None, description="URL for gateways; needed if rollout.host is 0.0.0.0"
    )
    served_model_name: str = Field("policy", description="the name that agents ask for")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of the engine and of published versions; float32 for exact agreement; auto: "
        "the model's own, and vLLM serves a float32 model in bfloat16",
    )
    max_model_len: Count = Field(4096, description="longest prompt and reply, tokens")
    max_num_seqs: Count = Field(256, description="requests in one engine step")
    kv_cache_mb: Count = Field(1024, description="memory for the KV cache on CPU")
    tool_parser: str | None = Field(None, description="vLLM tool-call parser")
    tool_parser_plugin: Path | None = Field(
        None, description="file that registers a parser of your own"
    )
    reasoning_parser: str | None = Field(None, description="vLLM reasoning parser")
    extra_args: Annotated[tuple[str, ...], Secret("arguments")] = Field(
        (), description="any further vLLM argument"
    )
    heartbeat_s: Positive = Field(2.0, description="how soon a dead worker is noticed")
    startup_timeout_s: Positive = Field(600.0, description="large models")
    drain_timeout_s: Positive | None = Field(
        None,
        description="longest wait for calls in flight at the stop; default: rest of "
        "up.stop_timeout_s",
    )
    serve_base: bool = Field(
        False, description="serve the boot weights before the first version exists"
    )

    @model_validator(mode="after")
    def _one_for_each_worker(self) -> RolloutSettings:
        for name in ("gpus", "attach_urls"):
            count = len(getattr(self, name))
            if count not in (0, self.workers):
                raise ValueError(
                    f"rollout.{name} has {count} entries, but rollout.workers={self.workers}: give "
                    "one for each worker"
                )
        if self.gpus and self.attach_urls:
            raise ValueError("rollout.gpus: the servers of rollout.attach_urls have theirs already")
        if self.workers > 1 and self.public_url is not None:
            raise ValueError(
                f"rollout.public_url is the URL of one worker, but rollout.workers={self.workers}: "
                "leave it out, and set rollout.host to an address that gateways can call"
            )
        return self

    @property
    def of_each_worker(self) -> tuple[RolloutSettings, ...]:
        """The settings of each worker, as its process gets them."""
        if self.workers == 1:
            return (self,)
        return tuple(
            self.model_copy(
                update={
                    "workers": 1,
                    "worker_id": f"{self.worker_id}-{index}",
                    "port": self.port + index,
                    "gpus": self.gpus[index : index + 1],
                    "attach_urls": self.attach_urls[index : index + 1],
                }
            )
            for index in range(self.workers)
        )

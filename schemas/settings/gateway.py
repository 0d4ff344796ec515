"""The gateway, its upstream engines and redaction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from clawstream.schemas.records.rewards import LARGEST_REWARD
from clawstream.schemas.settings.base import Count, Port, Positive, RewardNumber, Secret, Section

TemplateFamily = Literal[
    "qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3", "llama-3", "gemma4",
    "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "minimax-m2", "kimi-k2", "kimi-k2.5", "deepseek-v3",
    "deepseek-r1", "deepseek-v4", "hy3", "inkling", "nemotron-3", "nemotron-3-ultra",
    "nemotron-3.5",
]  # fmt: skip
"""Families of chat templates: names of the library `renderers`."""


class UpstreamSettings(Section):
    """An engine or provider outside the workers topic.

    A bare URL stands for one with all defaults.
    """

    url: Annotated[str, Secret("all")] = Field(description="its base URL, with or without /v1")
    kind: Literal["auto", "captured", "vllm", "text"] = Field(
        "auto", description="token capability, instead of probing it"
    )
    api_key: Annotated[str | None, Secret()] = Field(None, repr=False, description="its API key")
    api_key_env: str | None = Field(None, description="environment variable with its API key")
    api_key_header: Literal["authorization", "x-api-key"] | None = Field(
        None,
        description="default: x-api-key on Anthropic paths of a provider, else authorization: "
        "Bearer",
    )
    forward_credentials: bool = Field(
        False, description="agents bring their own keys of this provider"
    )
    models: tuple[str, ...] = Field((), description="the models it serves; default: all")
    model_map: Mapping[str, str] = Field({}, description="model name of agents to its own name")

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> UpstreamSettings:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("url is not http(s)://HOST[:PORT][/PATH]")
        if parts.port == 0 or parts.username is not None or parts.query or parts.fragment:
            raise ValueError(
                "url holds more than host and path; a key belongs into api_key or api_key_env"
            )
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("api_key and api_key_env are both set")
        return self


class RedactionSettings(Section):
    """Removal of secrets and personal data from stored data; see docs/redaction.md."""

    enabled: bool = Field(False, description="agents handle real secrets or people's data")
    rules: tuple[str, ...] = Field(
        (
            *(
                "private_key",
                "url_login",
                "aws_secret",
                "aws_key",
                "api_key",
                "jwt",
                "bearer",
                "secret",
            ),
            *("email", "iban", "card", "ssn", "phone"),
        ),
        description="what to redact: built-in kinds, `file.py:function` or `module:function`",
    )
    style: Literal["hashed", "plain"] = Field(
        "hashed", description="hashed: equal values get equal placeholders; plain: they do not"
    )
    tokenizers: Mapping[str, Path] = Field(
        {},
        description="model (or *) to tokenizer.json; default tokenizer_path; needed to keep "
        "token ids",
    )


def _passed_header(name: str) -> str:
    name = name.lower()
    if re.fullmatch(r"[a-z0-9!#$%&'*+.^_`|~-]+", name) is None:
        raise ValueError(f"{name!r} is no name of a header")
    if name in OWN_HEADERS or name.startswith("x-clawstream-"):
        raise ValueError(f"{name}: the gateway sets it or removes it itself")
    return name


OWN_HEADERS = frozenset({
    "authorization", "x-api-key", "api-key", "cookie", "set-cookie", "host", "connection",
    "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length",
    "content-encoding", "content-type", "accept", "accept-encoding", "user-agent", "expect",
    "proxy-authorization", "proxy-authenticate", "cache-control", "x-accel-buffering",
})  # fmt: skip
"""Headers of one connection, credentials, and those that the gateway writes."""
PassedHeader = Annotated[str, AfterValidator(_passed_header)]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False  # a name: where it leads is not known here


class GatewaySettings(Section):
    """Where agents point their base_url."""

    gateway_id: str = Field("gateway-0", description="several gateways: one name each")
    host: str = Field("127.0.0.1", description="0.0.0.0 to serve other machines")
    port: Port = Field(8100, description="the port is taken")
    public_url: str | None = Field(None, description="URL for agents, e.g. of a load balancer")
    base_path: Annotated[str, Field(pattern=r"^(/[^/?#\s]+)*$")] = Field(
        "", description="path prefix that a proxy in front does not remove, e.g. /api/openai"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="allowed origins of browser clients, e.g. https://app.example, or * for all"
    )
    upstreams: tuple[UpstreamSettings, ...] = Field(
        (), description="engines that do not report on the workers topic"
    )
    forward_headers: tuple[PassedHeader, ...] = Field(
        (), description="request headers that an engine needs beside those that always pass"
    )
    return_headers: tuple[PassedHeader, ...] = Field(
        (), description="reply headers that clients need beside those that always pass"
    )
    acks: Literal["all", "none"] = Field(
        "all", description="none: reply before the step is on Kafka; a crash may lose it"
    )
    produce_timeout_s: Positive = Field(
        5.0, description="wait for Kafka's acknowledgement before the step is spooled"
    )
    spool_dir: Path | None = Field(
        None, description="persistent volume for the spool; default <data_dir>/spool"
    )
    spool_max_bytes: Count = Field(1 << 30, description="longer Kafka outages")
    spool_max_age_s: Positive | None = Field(
        None,
        description="older segments need `clawstream spool drain`; default: "
        "jobs.closed_horizon_s / 2",
    )
    blob_uri: str | None = Field(
        None, description="fsspec URL of the store of large fields; default <data_dir>/blobs"
    )
    blob_options: Annotated[Mapping[str, str], Secret("options")] = Field(
        {}, description="fsspec options of blob_uri, e.g. credentials"
    )
    max_body_bytes: Count = Field(8 << 20, description="very long prompts or many images")
    max_in_flight: Count = Field(4096, description="memory: calls beyond it get 503")
    max_in_flight_bytes: Count = Field(
        256 << 20,
        description="memory: request bodies in flight, with 64 bytes for each of their values; "
        "above it 503; a call uses up to 6 times what it counts",
    )
    max_reply_bytes: Count = Field(
        64 << 20, description="larger replies that are not streamed; each is held in memory"
    )
    max_in_flight_reply_bytes: Count = Field(
        256 << 20,
        description="memory: replies in flight; above it 503 for new calls, and replies wait",
    )
    client_timeout_s: Positive = Field(
        60.0,
        description="slow clients: longest time without reading a reply, or to send a request "
        "slower than 4 KiB/s",
    )
    upstream_timeout_s: Positive = Field(
        600.0,
        description="longest silence of an engine, e.g. during a long reply that is not streamed",
    )
    upstream_total_timeout_s: Positive | None = Field(
        None, description="limit of a whole reply, e.g. for endless streams; default: none"
    )
    worker_wait_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="wait for a ready engine before 503"
    )
    probe_interval_s: Positive = Field(2.0, description="how soon an engine that hangs is noticed")
    session_secret: Annotated[str | None, Secret()] = Field(
        None, description="several gateways on several machines: the same for all"
    )
    auth: Literal["open", "required"] | None = Field(
        None,
        description="whether calls need a key; default: open on loopback, required on any other "
        "host",
    )
    api_keys_file: Path | None = Field(
        None, description="shared by several gateways; default <data_dir>/api-keys.json"
    )
    session_rewards: bool = Field(
        False, description="whether a session key suffices to send a reward with the completion"
    )
    reward_min: RewardNumber = Field(
        -LARGEST_REWARD, description="smallest reward that clients and people may give"
    )
    reward_max: RewardNumber = Field(
        LARGEST_REWARD, description="largest reward that clients and people may give"
    )
    max_prompt_tokens: Count | None = Field(
        None,
        description="reject longer prompts before the engine does; costs a tokenize request for "
        "long ones",
    )
    default_max_tokens: Count | None = Field(
        None, description="bound of replies whose client named none"
    )
    tokenizer_path: Path | None = Field(
        None,
        description="directory with tokenizer.json, to decode submitted steps and for "
        "compute_reward",
    )
    exact_continuation: TemplateFamily | None = Field(
        None,
        description="family of the model's chat template: turns keep the token ids of earlier "
        "turns; default: the template renders every prompt",
    )
    continuation_memory_bytes: Count = Field(
        256 << 20,
        description="memory of exact_continuation: token ids of replies; less forgets long or many "
        "conversations",
    )
    redaction: RedactionSettings = RedactionSettings()
    compute_reward: str | None = Field(
        None,
        description="function of POST /compute_reward: `name@version` or "
        "`file.py:function@version`",
    )

    @property
    def auth_required(self) -> bool:
        """Whether every request needs a key; by default yes for hosts that others can reach."""
        return self.auth == "required" if self.auth is not None else not self.on_loopback

    @property
    def on_loopback(self) -> bool:
        """Whether only programs of this machine reach it."""
        return _is_loopback(self.host)

    @model_validator(mode="after")
    def _consistent(self) -> GatewaySettings:
        if self.reward_min > self.reward_max:
            raise ValueError(
                f"reward_min {self.reward_min:g} is above reward_max {self.reward_max:g}"
            )
        return self

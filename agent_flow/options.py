"""Words `name=value` of the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, ValidationError
from pydantic_core import PydanticCustomError

from clawstream.agent_flow.environments.environment import SEEDS_OF_A_CHANNEL, Split
from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.flow import Limits
from clawstream.agent_flow.gateway.client import API_KEY
from clawstream.agent_flow.play.runner import Options

MOST_SEEDS = SEEDS_OF_A_CHANNEL // 2


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise PydanticCustomError(
            "url",
            "must be a URL such as http://127.0.0.1:8100; a setting of the gateway is written "
            "gateway.NAME=VALUE",
        )
    return text


class Words(BaseModel):
    """What the words of `flow run` and `flow exec` may set."""

    model_config = ConfigDict(extra="forbid")

    gateway: Annotated[str, AfterValidator(_url)] = Field(
        "http://127.0.0.1:8100", description="URL of the gateway"
    )
    run: str = Field("default", description="run that is trained")
    model: str = Field("policy", description="name that clients send")
    env: str | None = Field(None, description="LIBRARY:NAME of an environment")
    env_config: Json[dict[str, Any]] = Field(
        default_factory=dict, description="settings of the environment, a JSON object"
    )
    size: int | None = Field(
        None, gt=0, le=MOST_SEEDS, description="number of different tasks of an environment"
    )
    seed: int = Field(0, ge=0, le=MOST_SEEDS, description="of an environment's first task")
    tasks: Path | None = Field(None, description="*.jsonl, *.parquet, or a dataset directory")
    n: int | None = Field(None, gt=0, description="rollouts of each task")
    concurrency: int | None = Field(None, gt=0, description="rollouts at the same time")
    timeout_s: float | None = Field(None, gt=0, description="of one rollout, seconds")
    attempts: int | None = Field(
        None, gt=0, description="rollouts that may fail in one place of a group"
    )
    limit: int | None = Field(None, gt=0, description="number of tasks")
    epochs: int = Field(1, gt=0, description="passes over the tasks")
    shuffle: int | None = Field(None, description="seed of the order of the tasks")
    skip: int = Field(0, ge=0, description="tasks at the start that are not played")
    state: Path = Field(
        Path(".agent_flow"), description="directory that remembers which groups were played"
    )
    shard: str = Field(
        "0/1", pattern=r"^\d+/\d+$", description="I/N: this process is the I-th of N, from 0"
    )
    temperature: float | None = Field(None, ge=0, description="of `rollout.chat`")
    top_p: float | None = Field(None, gt=0, le=1, description="of `rollout.chat`")
    max_tokens: int | None = Field(None, gt=0, description="of each reply of `rollout.chat`")
    reward: str = Field(
        "none", description="of exec: exit, file, none, or a grader FILE.py:FUNCTION"
    )


@dataclass(frozen=True, slots=True)
class Mode:
    """channel val for an evaluation; dry: without effect."""

    evaluate: bool = False
    dry: bool = False

    @property
    def channel(self) -> Literal["train", "val"]:
        return "val" if self.evaluate or self.dry else "train"


def parse_words(words: Iterable[str], defaults: Mapping[str, Any]) -> Words:
    """Return the options that words set.

    Args:
        words: `name=value`.
        defaults: of the caller, by name.

    Raises:
        FlowError: A word is unknown or its value is wrong.
    """
    given = dict(defaults)
    for word in words:
        name, sep, value = word.partition("=")
        if not sep:
            raise FlowError(f"{word!r}: must be name=value; there are {', '.join(_names())}")
        given[name] = value
    try:
        return Words.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise FlowError(f"{name}: no such option; there are {', '.join(_names())}") from error
        raise FlowError(f"{name}={first['input']!r}: {first['msg']}") from error


def split_of(words: Words, mode: Mode) -> Split:
    """Return the tasks of an environment that are played."""
    return Split(mode.channel, words.size, words.seed, words.env_config)


def options_of(words: Words, limits: Limits, mode: Mode) -> Options:
    """Return how to play a flow with these limits of its own.

    Raises:
        FlowError: The shard is not below the number of processes.
    """
    index, processes = (int(part) for part in words.shard.split("/"))
    if index >= processes:
        raise FlowError(f"shard={words.shard}: must be I/N with I from 0 to N - 1")
    size = limits.group_size if not mode.evaluate else 1
    sampling = {
        name: value
        for name in ("temperature", "top_p", "max_tokens")
        if (value := getattr(words, name)) is not None
    }
    return Options(
        limits=Limits(
            group_size=words.n or size,
            concurrency=words.concurrency or limits.concurrency,
            timeout_s=words.timeout_s or limits.timeout_s,
            attempts=words.attempts or limits.attempts,
        ),
        run=words.run,
        channel=mode.channel,
        dry=mode.dry,
        shard=(index, processes),
        limit=1 if mode.dry else words.limit,
        epochs=1 if mode.dry else words.epochs,
        shuffle=words.shuffle,
        skip=words.skip,
        state=words.state if mode.channel == "train" else None,
        model=words.model,
        sampling=sampling,
    )


def api_key() -> str | None:
    """Return the caller's key; it is never a word, so no list of processes shows it."""
    return os.environ.get(API_KEY)


def _names() -> list[str]:
    return list(Words.model_fields)

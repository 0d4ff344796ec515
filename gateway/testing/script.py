"""What a scripted engine choices, and what a server is: a wire protocol from the engine's side. See `scripted_engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from schemas.records import Sampling

Json = dict[str, Any]


@dataclass(frozen=True)
class ScriptedChoice:
    """One choice: token ids, the text of each (None: a chunk without a delta), log-probabilities; and tool-call deltas after them.

    reasoning: how many of the first texts are reasoning.
    """

    ids: Sequence[int]
    texts: Sequence[str | None]
    logprobs: Sequence[float]
    tool_calls: Sequence[Json] = ()
    finish_reason: str = "stop"
    reasoning: int = 0

    @property
    def text(self) -> str:
        return "".join(t for t in self.texts if t)

    def message(self) -> Json:
        """The message of a plain reply."""
        message: Json = {
            "role": "assistant",
            "content": self.text or None,
            "refusal": None,
            "reasoning": None,
        }
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass
class Script:
    """What is said to one request.

    versions: per choice; None: the engine does not know. status: an error instead of a reply. die_after: the connection breaks
    after so many chunks. fail_after: an error event after so many chunks. gate: acquired before each chunk behind the first.
    no_tokens: an engine that tells neither ids nor log-probabilities. number: the reply's ids are made of it; agents take replies with
    one id for one reply. sampling: what the middleware tells of it. cached: prompt tokens that the engine had in its cache.
    """

    choices: Sequence[ScriptedChoice]
    prompt_ids: Sequence[int] = (1, 2, 3)
    versions: Sequence[Sequence[Json] | None] | None = None
    version_start: str | None = None
    status: int = 200
    die_after: int | None = None
    fail_after: int | None = None
    gate: asyncio.Semaphore | None = None
    no_tokens: bool = False
    number: int = 1
    sampling: Sampling | None = None
    cached: int | None = None


class Event(NamedTuple):
    """An event of a stream, as bytes with its blank line. shows: the tokens it brings: choice, first, behind the last."""

    data: bytes
    shows: Sequence[tuple[int, int, int]] = ()


class ProtocolServer(Protocol):
    """A wire protocol from the engine's side. With `script.no_tokens` no field of a reply tells tokens."""

    path: str

    def prompts(self, request: Json) -> int:
        """How many prompts the request has: generations of the engine."""
        ...

    def plain(self, request: Json, script: Script) -> Json:
        """The whole reply."""
        ...

    def events(self, request: Json, script: Script) -> Iterator[Event]:
        """The reply as a stream, its end marker included. Every token is shown by an event at the latest when it is told of."""
        ...

    def error(self, status: int) -> Json:
        """The body of an error."""
        ...

    def failure(self) -> bytes:
        """An error as an event of a stream, with what then ends the stream."""
        ...

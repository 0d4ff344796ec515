"""Define the script of a scripted engine and the interface of its protocol servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from clawstream.schemas.records import Sampling

Json = dict[str, Any]


@dataclass(frozen=True)
class ScriptedChoice:
    """Script one choice.

    ids: token ids. texts: the text of each token; None: a chunk without a delta. logprobs:
    log-probabilities. tool_calls: deltas after the tokens. reasoning: number of first texts that
    are reasoning.
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
        """Return the message of a plain reply."""
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
    """Script the reply to one request.

    versions: per choice; None: the engine reports none. status: an error instead of a reply.
    die_after: the connection breaks after this many chunks. fail_after: an error event follows this
    many chunks. gate: acquired before each chunk except the first. no_tokens: the engine reports
    neither ids nor log-probabilities. number: part of the reply's ids; agents treat replies with
    the same id as one reply. sampling: sampling parameters that the middleware reports. cached:
    prompt tokens that the engine had in its cache. tokenizer: its fingerprint. rendered: why the
    prompt does not continue the ids of the request.
    """

    choices: Sequence[ScriptedChoice]
    prompt_ids: Sequence[int] = (1, 2, 3)
    versions: Sequence[Sequence[Json] | None] | None = None
    version_start: str | None = None
    tokenizer: str | None = None
    status: int = 200
    die_after: int | None = None
    fail_after: int | None = None
    gate: asyncio.Semaphore | None = None
    no_tokens: bool = False
    number: int = 1
    sampling: Sampling | None = None
    cached: int | None = None
    rendered: str | None = None


class Event(NamedTuple):
    """Hold an event of a stream as bytes, with its blank line.

    shows: the tokens in it, as (choice, first, end), end exclusive.
    """

    data: bytes
    shows: Sequence[tuple[int, int, int]] = ()


def openai_error(status: int) -> Json:
    """Return the body of an error as vLLM writes it for each of OpenAI's protocols."""
    error = {"message": "scripted", "type": "BadRequestError", "param": None, "code": status}
    return {"error": error}


class ProtocolServer(Protocol):
    """Implement a wire protocol as an engine.

    With `script.no_tokens`, no reply field contains tokens.
    """

    path: str

    def prompts(self, request: Json) -> int:
        """Return the number of prompts of the request, which is the number of generations."""
        ...

    def plain(self, request: Json, script: Script) -> Json:
        """Return the whole reply."""
        ...

    def events(self, request: Json, script: Script) -> Iterator[Event]:
        """Yield the reply as a stream, with its end marker.

        Every token is in the `shows` of an event no later than the event that reports it.
        """
        ...

    def error(self, status: int) -> Json:
        """Return the body of an error."""
        ...

    def failure(self) -> bytes:
        """Return an error event and the bytes that end the stream."""
        ...

"""Where the tokens of a choice come from: what the engine's middleware told beside the reply, or the reply's own fields. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.protocols.base import Request, Tokens
from gateway.protocols.token_fields import NO_LOGPROBS, NO_PROMPT
from schemas import engine_frames
from schemas.records import Sampling, Usage, VersionSpan

NOT_TOLD = "the engine told nothing of the tokens"


class _ChoiceTokens:
    """One choice of a generation, growing."""

    __slots__ = ("finish", "ids", "logprobs", "spans")

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.logprobs: list[bytes] | None = []
        self.finish: str | None = None
        self.spans: tuple[engine_frames.Span, ...] | None = None


class CapturedTokens:
    """What the middleware told of a call so far. absent: why it tells nothing, where that is known from the start."""

    __slots__ = ("_absent", "_cached", "_choices", "_prompts", "_sampling", "_why", "wrong")

    def __init__(self, absent: str = NOT_TOLD) -> None:
        self._absent = absent
        self._prompts: dict[int, bytes] = {}
        self._why: dict[int, str] = {}
        self._sampling: dict[int, Sampling] = {}
        self._cached: dict[int, int] = {}
        self._choices: dict[tuple[int, int], _ChoiceTokens] = {}
        self.wrong: str | None = None
        """What was wrong with a frame: then no tokens of the call are believed."""

    def comment(self, event: bytes) -> None:
        """Take an event of a stream that carries frames."""
        try:
            self.add(engine_frames.read_comment(event))
        except (ValueError, TypeError) as error:
            self.wrong = str(error)

    def split_trailer(self, body: bytes, own: str | None) -> bytes:
        """Take the frames behind a plain reply; gives its own body. own: the header `capture.OWN_BODY`."""
        if own is None:
            return body
        try:
            mine, frames = engine_frames.split(body, own)
        except ValueError as error:
            self.wrong = str(error)
            return body[: int(own)] if own.isascii() and own.isdigit() else body
        self.add(frames)
        return mine

    def add(self, frames: Iterable[engine_frames.Frame]) -> None:
        """Take frames."""
        for generation, prompt_ids, choices, absent, sampling, cached in frames:
            if prompt_ids is not None:
                self._prompts[generation] = prompt_ids
            if absent is not None:
                self._why[generation] = absent
            if sampling is not None:
                self._sampling[generation] = sampling
            if cached is not None:
                self._cached[generation] = cached
            for which, ids, logprobs, finish, spans in choices:
                tokens = self._choices.get((generation, which))
                if tokens is None:
                    tokens = self._choices[generation, which] = _ChoiceTokens()
                tokens.ids.append(ids)
                if logprobs is None:
                    if ids:
                        tokens.logprobs = None
                elif tokens.logprobs is not None:
                    tokens.logprobs.append(logprobs)
                if finish is not None:
                    tokens.finish, tokens.spans = finish, spans

    def finish(self, index: int, request: Request) -> str | None:
        """The engine's own finish reason of a choice; None: not reported."""
        tokens = self._choices.get(divmod(index, request.n // request.prompts))
        return tokens.finish if tokens is not None else None

    def sampling(self, index: int, request: Request) -> Sampling | None:
        """How the engine sampled a choice; None: not reported."""
        if self.wrong is not None:
            return None
        return self._sampling.get(index // (request.n // request.prompts))

    def usage(self) -> Usage | None:
        """What the tokens come to that were told; None: none were."""
        if self.wrong is not None or not self._prompts:
            return None
        return Usage(
            prompt_tokens=sum(map(len, self._prompts.values())) // 4,
            cached_tokens=sum(self._cached.values())
            if self._cached.keys() == self._prompts.keys()
            else None,
            completion_tokens=sum(
                len(ids) for tokens in self._choices.values() for ids in tokens.ids
            )
            // 4,
        )

    def tokens(self, index: int, request: Request) -> Tokens:
        """The tokens of a choice. Every prompt of the request is a generation of the engine, with its share of the choices."""
        if self.wrong is not None:
            return Tokens(absent=f"the engine's account of the tokens is unreadable: {self.wrong}")
        generations = max(len(self._prompts), len(self._why))
        if (
            generations > request.prompts
        ):  # tools that run in the engine: their turns are no single sequence
            return Tokens(absent=f"{generations} generations for {request.prompts} prompts")
        place = divmod(index, request.n // request.prompts)
        prompt, tokens = self._prompts.get(place[0]), self._choices.get(place)
        absent = self._why.get(place[0])
        if tokens is None or absent is not None:
            return Tokens(prompt_ids=prompt, absent=absent or self._absent)
        ids = b"".join(tokens.ids)
        logprobs = b"".join(tokens.logprobs) if tokens.logprobs is not None else None
        if logprobs is None:
            absent = NO_LOGPROBS
        elif prompt is None:
            absent = NO_PROMPT
        return Tokens(prompt, ids, logprobs, _covering(tokens.spans, len(ids) // 4), absent)


def _covering(spans: tuple[engine_frames.Span, ...] | None, tokens: int) -> tuple[VersionSpan, ...]:
    """The spans, if they cover all tokens without a hole; none otherwise: a version is certain or it is not said."""
    at, made = 0, []
    for version, start, end in spans or ():
        if start != at or end < start:
            return ()
        made.append(VersionSpan(version=version, start=start, end=end))
        at = end
    return tuple(made) if at == tokens else ()

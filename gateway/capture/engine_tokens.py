"""Collects the tokens that the engine's middleware sends next to a reply. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clawstream.gateway.protocols.base import EngineKind, Request, Tokens
from clawstream.gateway.protocols.token_fields import NO_LOGPROBS, NO_PROMPT
from clawstream.schemas import engine_frames
from clawstream.schemas.records import Sampling, Usage, VersionSpan

NOT_REPORTED = "the engine reported no tokens"
NO_TOKENS: Mapping[EngineKind, str] = {
    "captured": NOT_REPORTED,
    "vllm": "vLLM without our middleware reports no tokens over this protocol",
    "text": "the provider reports no tokens",
}
"""Why an engine that replied reported no tokens."""


class _ChoiceTokens:
    """Buffer of one choice of a generation."""

    __slots__ = ("finish", "ids", "logprobs", "spans")

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.logprobs: list[bytes] | None = []
        self.finish: str | None = None
        self.spans: tuple[engine_frames.Span, ...] | None = None


class CapturedTokens:
    """Token frames of one call.

    absent: Reason for missing tokens when no frame arrives.
    """

    __slots__ = (
        "_absent", "_cached", "_choices", "_prompts", "_rendered", "_sampling", "_why", "wrong",
    )  # fmt: skip

    def __init__(self, absent: str = NOT_REPORTED) -> None:
        self._absent = absent
        self._prompts: dict[int, bytes] = {}
        self._why: dict[int, str] = {}
        self._sampling: dict[int, Sampling] = {}
        self._cached: dict[int, int] = {}
        self._rendered: dict[int, str] = {}
        self._choices: dict[tuple[int, int], _ChoiceTokens] = {}
        self.wrong: str | None = None
        """Error of an invalid frame; the call then has no tokens."""

    def comment(self, event: bytes) -> None:
        """Add the frames of an SSE comment."""
        try:
            self.add(engine_frames.read_comment(event))
        except (ValueError, TypeError) as error:
            self.wrong = str(error)

    def split_trailer(self, body: bytes, own: str | None) -> bytes:
        """Add the frames behind a plain reply and return the reply body.

        own: Value of the header `engine_frames.OWN_BODY`, the size of the body in bytes.
        """
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
        """Add frames."""
        for generation, prompt_ids, choices, absent, sampling, cached, rendered in frames:
            if prompt_ids is not None:
                self._prompts[generation] = prompt_ids
            if absent is not None:
                self._why[generation] = absent
            if sampling is not None:
                self._sampling[generation] = sampling
            if cached is not None:
                self._cached[generation] = cached
            if rendered is not None:
                self._rendered[generation] = rendered
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
        """Return the engine's finish reason of a choice; None when not reported."""
        tokens = self._choices.get(divmod(index, request.n // request.prompts))
        return tokens.finish if tokens is not None else None

    def sampling(self, index: int, request: Request) -> Sampling | None:
        """Return the sampling parameters of a choice; None when not reported."""
        if self.wrong is not None:
            return None
        return self._sampling.get(index // (request.n // request.prompts))

    def rendered(self, index: int, request: Request) -> str | None:
        """Return why the prompt of a choice was rendered; None when not reported."""
        return self._rendered.get(index // (request.n // request.prompts))

    @property
    def sampled(self) -> bool:
        """Whether the engine reported tokens of any choice."""
        return bool(self._choices)

    def usage(self) -> Usage | None:
        """Count the reported tokens; None when the engine reported none."""
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
        """Return the tokens of a choice.

        Each prompt of the request is one generation of the engine, with its share of the choices.
        """
        if self.wrong is not None:
            return Tokens(absent=f"the engine's token frames are invalid: {self.wrong}")
        generations = max(len(self._prompts), len(self._why))
        if generations > request.prompts:
            # Tools that run in the engine make several generations, not one sequence.
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
    """Return the version spans if they cover all tokens without a gap, else none."""
    at, made = 0, []
    for version, start, end in spans or ():
        if start != at or end < start:
            return ()
        made.append(VersionSpan(version=version, start=start, end=end))
        at = end
    return tuple(made) if at == tokens else ()

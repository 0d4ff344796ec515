"""Token capture inside vLLM's API server: an ASGI middleware that adds to a reply the tokens of the
call and the way they were sampled (`clawstream.schemas.engine_frames`).

    --middleware clawstream.rollout.vllm_plugin.token_capture.Capture

All of vLLM's endpoints call one method of its engine client, `generate`. `EngineTap` replaces it:
for requests with the capture header it records what `generate` yields and passes it on; for other
requests it costs one lookup. So one mechanism serves all endpoints, and the server's own bytes are
unchanged. The tap makes the engine compute log-probabilities; the endpoint
does not show them, because its client did not ask for them.

Nothing here imports vLLM: its objects are used by their attributes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from clawstream.rollout.vllm_plugin.adapters import adapters_of
from clawstream.rollout.vllm_plugin.continuation import PriorTokens, PromptTap
from clawstream.rollout.vllm_plugin.sampling import ServerOptions, sampling_of, server_options
from clawstream.schemas import engine_frames as wire
from clawstream.schemas.records import Sampling
from clawstream.schemas.tokens import fingerprint, pack_ids, pack_logprobs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Labels = Sequence[tuple[bytes, bytes]]
"""Headers that every reply carries."""

_CAPTURE_HEADER = (wire.ASK.encode(), b"1")
_CONTINUE_HEADER = (wire.CONTINUE.encode(), b"1")
BEAM_SEARCH = "beam search: its tokens are searched, not sampled"
EMBEDDINGS = "the prompt is embeddings, not tokens"
_BEAM = re.compile(r"-beam-\d+$")


class ChoiceBuffer:
    """New tokens of one choice since the last frame.

    seen: Ids appended so far. logprobs: None when the engine has none for these ids.
    """

    __slots__ = ("finish", "ids", "logprobs", "seen", "spans")

    def __init__(self) -> None:
        self.seen = 0
        self.finish: str | None = None
        self.spans: tuple[wire.Span, ...] | None = None
        self.clear()

    def clear(self) -> None:
        """Start the next frame."""
        self.ids: list[int] = []
        self.logprobs: list[float] | None = []

    def append(self, output: Any, delta: bool) -> None:
        """Append the new part of a CompletionOutput. delta: it holds only new tokens."""
        ids, logprobs = output.token_ids, output.logprobs
        if not delta and self.seen:
            ids, logprobs = ids[self.seen :], logprobs and logprobs[self.seen :]
        self.seen += len(ids)
        self.ids.extend(ids)
        if self.logprobs is not None:
            values = sampled_logprobs(ids, logprobs)
            if values is None:
                self.logprobs = None
            else:
                self.logprobs.extend(values)
        if output.finish_reason is not None:
            self.finish = output.finish_reason
            if output.weight_versions is not None:
                self.spans = tuple(
                    (span.version, span.start, span.end) for span in output.weight_versions
                )

    def flush(self, which: int) -> wire.Choice:
        """Return the content since the last flush."""
        logprobs = None if self.logprobs is None else pack_logprobs(self.logprobs)
        choice = wire.Choice(which, pack_ids(self.ids), logprobs, self.finish, self.spans)
        self.clear()
        return choice


def sampled_logprobs(ids: Sequence[int], logprobs: Any) -> list[float] | None:
    """Return the log-probabilities of the sampled ids; None when vLLM has none for these ids.

    logprobs: vLLM's, {id: Logprob} for each position.
    """
    if not ids:
        return []
    if logprobs is None or len(logprobs) != len(ids):
        return None
    try:
        return [position[token].logprob for token, position in zip(ids, logprobs, strict=True)]
    except KeyError:
        return None


class Generation:
    """The output of one `generate` call since the last frame.

    absent: Why its tokens must not be reported. rendered: See `Frame`.
    """

    def __init__(
        self,
        index: int,
        delta: bool,
        sampling: Sampling | None = None,
        absent: str | None = None,
        rendered: str | None = None,
    ) -> None:
        self._index, self._delta, self._sampling, self._absent = index, delta, sampling, absent
        self._rendered = rendered
        self._prompt: Sequence[int] | None = None
        self._cached: int | None = None
        self._choices: dict[int, ChoiceBuffer] = {}
        self._news: set[int] = set()
        self._begun = False

    def append(self, output: Any) -> None:
        """Append a RequestOutput of vLLM."""
        if not self._begun:
            self._prompt = output.prompt_token_ids
            self._cached = (
                output.num_cached_tokens if (output.num_cached_tokens or 0) >= 0 else None
            )
        for choice in output.outputs:
            buffer = self._choices.get(choice.index)
            if buffer is None:
                buffer = self._choices[choice.index] = ChoiceBuffer()
            buffer.append(choice, self._delta)
            if choice.token_ids or choice.finish_reason is not None:
                self._news.add(choice.index)

    def flush(self) -> wire.Frame | None:
        """Return a frame of the content since the last flush; None when empty."""
        if self._absent is not None:
            if self._begun:
                return None
            self._begun = True
            return wire.Frame(self._index, None, (), self._absent)
        if not self._news:
            return None
        prompt = None if self._prompt is None else pack_ids(self._prompt)
        choices = tuple(self._choices[which].flush(which) for which in sorted(self._news))
        frame = wire.Frame(
            self._index, prompt, choices, None, self._sampling, self._cached, self._rendered
        )
        self._begun, self._prompt, self._sampling, self._cached = True, None, None, None
        self._rendered = None
        self._news.clear()
        return frame


class Call:
    """The generations of one request, in the order in which the endpoint started them."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self.prior_tokens = PriorTokens()

    def begin(
        self, prompt: Any, sampling_params: Any, request_id: str, server: ServerOptions
    ) -> Generation | None:
        """Start a generation; return None for a further step of a beam search."""
        absent = None
        if (
            sampling_params.max_tokens == 1
            and not sampling_params.detokenize
            and _BEAM.search(request_id)
        ):
            # vLLM searches beams by many generations of one token each; none of them is the reply.
            if self.generations:
                return None
            absent = BEAM_SEARCH
        elif isinstance(prompt, dict) and prompt.get("type") == "embeds":
            absent = EMBEDDINGS  # vLLM would name zeros as the prompt's ids
        delta = sampling_params.output_kind.name == "DELTA"
        generation = Generation(
            len(self.generations),
            delta,
            sampling_of(sampling_params, server),
            absent,
            self.prior_tokens.reason,
        )
        self.generations.append(generation)
        return generation

    def flush(self) -> bytes:
        """Return the encoded frames since the last flush."""
        frames = (generation.flush() for generation in self.generations)
        return b"".join(wire.encode(frame) for frame in frames if frame is not None)


_call: ContextVar[Call | None] = ContextVar("clawstream_capture", default=None)
"""The captured call that this task serves, if any. Tasks that an endpoint starts inherit it."""


def _prior_tokens() -> PriorTokens | None:
    call = _call.get()
    return None if call is None else call.prior_tokens


class EngineTap:
    """Wraps vLLM's engine client: records outputs of captured calls, and new version labels.

    tokenizer: Fingerprint of the engine's tokenizer; None if it serves without one.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._label: str | None = None
        adapters_of(client)
        self._server = server_options(client)
        tokenizer = client.tokenizer
        self.tokenizer = None if tokenizer is None else fingerprint(tokenizer.get_vocab())
        if (renderer := getattr(client, "renderer", None)) is not None:
            PromptTap(renderer, _prior_tokens, self.tokenizer)
        self._generate = client.generate
        self._update_weight_version = client.update_weight_version
        client.generate = self.generate
        client.update_weight_version = self.update_weight_version

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncIterator[Any]:
        call = _call.get()
        generation = (
            None if call is None else call.begin(prompt, sampling_params, request_id, self._server)
        )
        if generation is None:
            return self._generate(prompt, sampling_params, request_id, **more)  # type: ignore[no-any-return]
        outputs = self._generate(prompt, with_logprobs(sampling_params), request_id, **more)
        return _recording(generation, outputs)

    async def update_weight_version(self, new_version: str) -> None:
        await self._update_weight_version(new_version)
        self._label = new_version

    async def label(self) -> str:
        """Return the engine's version label; requested once, because it costs an engine step."""
        if self._label is None:
            label = await self._client.get_weight_version()
            if self._label is None:
                self._label = label
        return self._label


def with_logprobs(sampling_params: Any) -> Any:
    """Return parameters that make the engine compute the sampled token's log-probability."""
    if sampling_params.num_logprobs is not None:
        return sampling_params
    changed = copy.copy(sampling_params)
    changed.logprobs = 0
    return changed


async def _recording(generation: Generation, outputs: Any) -> AsyncIterator[Any]:
    # When a client disconnects, this generator is closed; vLLM's must abort the request at once.
    async with aclosing(outputs):
        async for output in outputs:
            generation.append(output)
            yield output


class Capture:
    """The middleware. It does not touch `/health`, which must answer for a dead engine too."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._tap: EngineTap | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        if self._tap is None:
            self._tap = EngineTap(scope["app"].state.engine_client)
        labels = [(wire.VERSION_START.encode(), (await self._tap.label()).encode())]
        if self._tap.tokenizer is not None:
            labels.append((wire.TOKENIZER.encode(), self._tap.tokenizer.encode()))
        if _CAPTURE_HEADER not in scope["headers"]:
            await self._app(scope, receive, _labelled(labels, send))
            return
        call = Call()
        if _CONTINUE_HEADER in scope["headers"]:
            receive = _without_prior(call.prior_tokens, receive)
        token = _call.set(call)
        try:
            await self._app(scope, receive, Reply(call, labels, send).send)
        finally:
            _call.reset(token)


def _without_prior(given: PriorTokens, receive: Receive) -> Receive:
    """Return a `receive` that gives the body without the earlier turn's tokens."""
    begun = False

    async def received() -> MutableMapping[str, Any]:
        nonlocal begun
        message = await receive()
        if begun or message["type"] != "http.request":
            return message
        begun, parts = True, [message.get("body", b"")]
        while message.get("more_body"):
            message = await receive()
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
        body, given.prior = wire.split_prior(b"".join(parts))
        return {"type": "http.request", "body": body, "more_body": False}

    return received


def _labelled(labels: Labels, send: Send) -> Send:
    async def labelled(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *labels]}
        await send(message)

    return labelled


class Reply:
    """Adds the frames of a captured call to its reply."""

    def __init__(self, call: Call, labels: Labels, send: Send) -> None:
        self._call, self._labels, self._send = call, labels, send
        self._stream = False
        self._held: MutableMapping[str, Any] | None = None
        self._parts: list[bytes] = []

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Replace ASGI's send."""
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body" and self._stream:
            # vLLM sends whole events, so a comment between two messages stands between two events.
            if frames := self._call.flush():
                message = {**message, "body": wire.comment(frames) + message.get("body", b"")}
            await self._send(message)
        elif message["type"] == "http.response.body" and self._held is not None:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._finish(self._held)
        else:
            await self._send(message)

    async def _start(self, message: MutableMapping[str, Any]) -> None:
        headers = [*message.get("headers", ()), *self._labels, _CAPTURE_HEADER]
        message = {**message, "headers": headers}
        self._stream = any(
            k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers
        )
        if not self._stream and message["status"] == 200 and self._call.generations:
            # A plain reply is generated before it begins; its length is known at its end.
            self._held = message
            return
        await self._send(message)

    async def _finish(self, start: MutableMapping[str, Any]) -> None:
        body = b"".join(self._parts)
        whole = wire.trail(body, (self._call.flush(),))
        headers = [
            (name, value) for name, value in start["headers"] if name.lower() != b"content-length"
        ]
        headers.append((b"content-length", b"%d" % len(whole)))
        headers.append((wire.OWN_BODY.encode(), b"%d" % len(body)))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": whole})

"""Token capture without an engine: the bytes on the wire, and the middleware around an app that
generates as vLLM does.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.rollout.vllm_plugin.sampling import sampling_of, server_options
from clawstream.rollout.vllm_plugin.token_capture import (
    BEAM_SEARCH,
    EMBEDDINGS,
    Call,
    Capture,
    EngineTap,
    _call,
)
from clawstream.schemas import engine_frames
from clawstream.schemas.engine_frames import Choice, Frame
from clawstream.schemas.records import Sampling
from clawstream.schemas.tokens import (
    fingerprint,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)

# ---------------------------------------------------------------- wire

INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SPANS = st.lists(st.tuples(TEXT, st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple)


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    ids = draw(st.lists(INT32, max_size=9))
    logprobs = draw(st.none() | st.lists(st.floats(width=32), min_size=len(ids), max_size=len(ids)))
    return Choice(
        draw(st.integers(0, 9)),
        pack_ids(ids),
        None if logprobs is None else pack_logprobs(logprobs),
        draw(st.none() | TEXT),
        draw(st.none() | SPANS),
    )


SAMPLING = st.builds(
    Sampling,
    source=st.just("engine"),
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0, 1),
    top_k=st.none() | st.integers(0, 2**31 - 1),
    repetition_penalty=st.none() | st.floats(0, 2),
    constraints=st.lists(TEXT, max_size=3).map(tuple),
    logprobs_mode=st.none() | TEXT,
)
FRAME = st.builds(
    Frame,
    st.integers(0, 9),
    st.none() | st.lists(INT32, max_size=30).map(pack_ids),
    st.lists(choices(), max_size=3).map(tuple),
    st.none() | TEXT,
    st.none() | SAMPLING,
    st.none() | st.integers(0, 2**31 - 1),
    st.none() | TEXT,
)
FRAMES = st.lists(FRAME, max_size=4)
EVENTS = st.sampled_from(
    [b"data: {}\n\n", b"event: ping\ndata: {}\n\n", b": keep alive\n\n", b"data: [DONE]\n\n"]
)


@pytest.mark.slow
@given(FRAMES)
def test_what_is_encoded_is_decoded(frames: list[Frame]) -> None:
    assert engine_frames.decode(b"".join(map(engine_frames.encode, frames))) == frames


@pytest.mark.slow
@given(FRAMES, st.binary(max_size=60))
def test_a_plain_reply_is_split_again(frames: list[Frame], body: bytes) -> None:
    whole = engine_frames.trail(body, map(engine_frames.encode, frames))
    assert engine_frames.split(whole, str(len(body))) == (body, frames)


@pytest.mark.slow
@given(st.lists(st.tuples(FRAMES, EVENTS), max_size=5))
def test_comments_are_events_of_their_own(sent: list[tuple[list[Frame], bytes]]) -> None:
    stream = b"".join(
        engine_frames.comment(b"".join(map(engine_frames.encode, frames))) + event
        for frames, event in sent
    )
    events = [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
    told = [
        engine_frames.read_comment(event) for event in events if engine_frames.is_comment(event)
    ]
    assert told == [frames for frames, _ in sent]
    assert [event for event in events if not engine_frames.is_comment(event)] == [
        event for _, event in sent
    ]


@given(FRAME, st.data())
def test_a_frame_cut_short_is_an_error(frame: Frame, data: st.DataObject) -> None:
    encoded = engine_frames.encode(frame)
    with pytest.raises(ValueError, match=r"."):
        engine_frames.decode(encoded[: data.draw(st.integers(1, len(encoded) - 1))])


@pytest.mark.parametrize(
    "bad", [b"{}\n", b'{"g":0,"c":[{}]}\n', b'{"g":0,"c":0}\n', b"[]\n", b"x\n", b"no newline"]
)
def test_a_frame_that_is_none_is_an_error(bad: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        engine_frames.decode(bad)


@pytest.mark.parametrize(
    "more",
    [
        b'"s":0',
        b'"s":{"temperature":"1"}',
        b'"s":{"top_p":true}',
        b'"s":{"top_k":1.5}',
        b'"s":{"top_k":4294967296}',
        b'"s":{"logprobs_mode":1}',
        b'"s":{"constraints":[1]}',
        b'"s":{"constraints":3}',
        b'"h":-1',
        b'"h":"1"',
        b'"h":true',
        b'"r":1',
    ],
)
def test_sampling_parameters_of_a_wrong_type_are_an_error(more: bytes) -> None:
    with pytest.raises(ValueError, match="capture frame"):
        engine_frames.decode(b'{"g":0,"c":[],%s}\n' % more)


def test_sampling_parameters_of_a_newer_middleware_are_left_out() -> None:
    (frame,) = engine_frames.decode(b'{"g":0,"c":[],"s":{"temperature":1,"xtc":0.5}}\n')
    assert frame.sampling == Sampling(source="engine", temperature=1.0)


@pytest.mark.parametrize("own", ["", "x", "-1", "4"])
def test_a_length_that_cannot_be_is_an_error(own: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        engine_frames.split(b"abc", own)


def test_ids_and_logprobs_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="log-probabilities"):
        engine_frames.encode(Frame(0, None, (Choice(0, pack_ids([1, 2]), pack_logprobs([-0.5])),)))


# ---------------------------------------------------------------- an app that generates as vLLM
# does


class Kind(Enum):
    DELTA = 1
    CUMULATIVE = 2
    FINAL_ONLY = 3


@dataclass
class Structured:
    json: str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


@dataclass
class Params:
    n: int = 1
    output_kind: Kind = Kind.DELTA
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    max_tokens: int = 3
    detokenize: bool = True
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    structured_outputs: Structured | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    thinking_token_budget: int | None = None
    watermarking: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        asked = len(self.logprob_token_ids) if self.logprob_token_ids else None
        return asked if self.logprobs is None else self.logprobs


@dataclass
class Logprob:
    logprob: float


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Output:
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[Output]
    num_cached_tokens: int | None = 2


PROMPT = [7, 8, 9]


@dataclass
class ModelConfig:
    logprobs_mode: str = "processed_logprobs"
    logits_processors: list[str] | None = None


@dataclass
class VllmConfig:
    watermark_config: object | None = None


class VocabularyOnly:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1}


@dataclass
class Client:
    """What the middleware needs of vLLM's engine client.

    A choice's ids are 10 * (choice + 1) and the next two, log-probability -id.
    """

    asked: int = 0
    closed: bool = False
    seen: list[Params] = field(default_factory=list)
    model_config: ModelConfig = field(default_factory=ModelConfig)
    vllm_config: VllmConfig = field(default_factory=VllmConfig)
    tokenizer: VocabularyOnly | None = field(default_factory=VocabularyOnly)

    async def generate(
        self, prompt: Any, sampling_params: Params, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        self.seen.append(sampling_params)
        told = sampling_params.num_logprobs is not None

        def output(which: int, start: int, end: int) -> Output:
            ids = [10 * (which + 1) + i for i in range(start, end)]
            ended = end == 3
            spans = [Span("v1", 0, 2), Span("v2", 2, 3)] if ended else None
            logprobs = [{-1: Logprob(0.0), i: Logprob(-float(i))} for i in ids] if told else None
            return Output(which, ids, logprobs, "stop" if ended else None, spans)

        choices = range(sampling_params.n)
        try:
            if sampling_params.output_kind is Kind.FINAL_ONLY:
                yield RequestOutput(PROMPT, [output(i, 0, 3) for i in choices])
                return
            for step in range(3):
                for i in choices:
                    start = step if sampling_params.output_kind is Kind.DELTA else 0
                    yield RequestOutput(PROMPT, [output(i, start, step + 1)])
        finally:
            self.closed = True

    async def update_weight_version(self, new_version: str) -> None:
        """Stores nothing: the label that is told must be the one that was set."""

    async def get_weight_version(self) -> str:
        self.asked += 1
        return "default"


@dataclass
class State:
    engine_client: Client


class App:
    """An ASGI app: a plain reply in two messages, or an event for each output.

    It generates once for each of `params`.
    """

    def __init__(
        self, *params: Params, stream: bool = False, prompt: Any = None, status: int = 200
    ) -> None:
        self.client = Client()
        self.state = State(self.client)
        self.params, self.stream, self.status, self.prompt = params, stream, status, prompt
        self.request_id = "r"

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        outputs = [
            self.state.engine_client.generate(
                self.prompt, copy.copy(params), request_id=self.request_id
            )
            for params in self.params
        ]
        if not self.stream:
            for generation in outputs:
                async for _ in generation:
                    pass
        kind = b"text/event-stream; charset=utf-8" if self.stream else b"application/json"
        headers = [(b"content-type", kind)] + ([] if self.stream else [(b"Content-Length", b"4")])
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        if not self.stream:
            await send({"type": "http.response.body", "body": b"{ ", "more_body": True})
            await send({"type": "http.response.body", "body": b" }"})
            return
        for generation in outputs:
            async for output in generation:
                ids = ",".join(str(i) for o in output.outputs for i in o.token_ids)
                await send(
                    {
                        "type": "http.response.body",
                        "body": f"data: {ids}\n\n".encode(),
                        "more_body": True,
                    }
                )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def call(
    app: App,
    middleware: Capture | None = None,
    *,
    asking: bool = True,
    path: str = "/v1/completions",
) -> tuple[dict[str, str], bytes]:
    """Headers and body of one request's reply."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing to receive")

    headers = [(engine_frames.ASK.encode(), b"1")] if asking else []
    scope = {"type": "http", "path": path, "app": app, "headers": headers}
    asyncio.run((middleware or Capture(app))(scope, receive, send))
    names = [name.lower() for name, _ in sent[0]["headers"]]
    assert len(names) == len(set(names))
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message["body"] for message in sent[1:])
    assert int(found.get("content-length", len(body))) == len(body)
    return found, body


def whole(which: int, spans: bool = True) -> Choice:
    """All of a choice of the fake client."""
    ids = [10 * (which + 1) + i for i in range(3)]
    told = (("v1", 0, 2), ("v2", 2, 3))
    return Choice(
        which,
        pack_ids(ids),
        pack_logprobs([-float(i) for i in ids]),
        "stop",
        told if spans else None,
    )


HOW = Sampling(
    source="engine",
    temperature=0.7,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    logprobs_mode="processed_logprobs",
)


def first_frame(generation: int, *choices: Choice) -> Frame:
    """What the first frame of a generation tells besides."""
    return Frame(generation, pack_ids(PROMPT), choices, None, HOW, 2)


def test_a_plain_reply_is_followed_by_one_frame_a_generation() -> None:
    final = Params(n=2, output_kind=Kind.FINAL_ONLY)
    headers, body = call(App(final, final))
    assert headers[engine_frames.ASK] == "1"
    own, frames = engine_frames.split(body, headers[engine_frames.OWN_BODY])
    assert own == b"{  }"
    assert frames == [first_frame(g, whole(0), whole(1)) for g in range(2)]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_plain_reply_does_not_depend_on_how_the_outputs_came(kind: Kind) -> None:
    headers, body = call(App(Params(n=2, output_kind=kind)))
    _, frames = engine_frames.split(body, headers[engine_frames.OWN_BODY])
    assert frames == [first_frame(0, whole(0), whole(1))]


@pytest.mark.parametrize("kind", [Kind.DELTA, Kind.CUMULATIVE])
def test_in_a_stream_tokens_come_right_before_the_event_that_shows_them(kind: Kind) -> None:
    _, body = call(App(Params(n=2, output_kind=kind), stream=True))
    events = [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]
    comments, own = events[:-1:2], [*events[1:-1:2], events[-1]]
    assert b"".join(own) == call(App(Params(n=2, output_kind=kind), stream=True), asking=False)[1]
    assert own[-1] == b"data: [DONE]\n\n"
    frames = [engine_frames.read_comment(comment)[0] for comment in comments]
    told_once = [(frame.prompt_ids, frame.sampling, frame.cached) for frame in frames]
    assert told_once == [(pack_ids(PROMPT), HOW, 2)] + [(None, None, None)] * 5
    shown = [
        own_event.decode().strip().split(",")[-1].removeprefix("data: ") for own_event in own[:-1]
    ]
    assert [str(unpack_ids(frame.choices[0].ids)[-1]) for frame in frames] == shown
    for which in range(2):
        (first, second, last) = (
            choice for frame in frames for choice in frame.choices if choice.which == which
        )
        assert first.finish is None
        assert second.spans is None
        assert whole(which) == Choice(
            which,
            first.ids + second.ids + last.ids,
            (first.logprobs or b"") + (second.logprobs or b"") + (last.logprobs or b""),
            last.finish,
            last.spans,
        )


def test_who_does_not_ask_gets_the_label_and_nothing_else() -> None:
    app = App(Params(output_kind=Kind.FINAL_ONLY))
    headers, body = call(app, asking=False)
    assert body == b"{  }"
    assert headers == {
        "content-type": "application/json",
        "content-length": "4",
        engine_frames.VERSION_START: "default",
        engine_frames.TOKENIZER: fingerprint(VocabularyOnly().get_vocab()),
    }
    assert app.client.seen == [Params(output_kind=Kind.FINAL_ONLY)], (
        "the engine computes nothing for us"
    )


def test_the_label_is_followed_not_asked_for() -> None:
    app = App()
    middleware = Capture(app)
    assert call(app, middleware)[0][engine_frames.VERSION_START] == "default"
    asyncio.run(app.client.update_weight_version("run/1.0"))
    for asking in (True, False):
        assert call(app, middleware, asking=asking)[0][engine_frames.VERSION_START] == "run/1.0"
    assert app.client.asked == 1


def test_a_reply_that_sampled_nothing_or_failed_has_no_frames() -> None:
    for app in (App(), App(Params(), status=500)):
        headers, body = call(app)
        assert headers[engine_frames.ASK] == "1"
        assert engine_frames.OWN_BODY not in headers
        assert body == b"{  }"


def test_the_health_of_a_dead_engine_can_be_asked() -> None:
    app = App()
    headers, _ = call(app, path="/health")
    assert app.client.asked == 0
    assert engine_frames.VERSION_START not in headers


@pytest.mark.parametrize(
    ("params", "logprobs"),
    [(Params(), 0), (Params(logprobs=5), 5), (Params(logprob_token_ids=[1, 2]), None)],
)
def test_the_engine_is_asked_for_logprobs_unless_the_client_did(
    params: Params, logprobs: int | None
) -> None:
    app = App(params)
    before = copy.copy(params)
    headers, body = call(app)
    assert [seen.logprobs for seen in app.client.seen] == [logprobs]
    assert params == before
    _, frames = engine_frames.split(body, headers[engine_frames.OWN_BODY])
    assert frames[0].choices[0].logprobs == whole(0).logprobs


def test_logprobs_that_the_engine_does_not_give_are_not_invented() -> None:
    call_ = Call()
    generation = call_.begin(None, Params(), "r", server_options(Client()))
    assert generation is not None
    generation.append(RequestOutput(PROMPT, [Output(0, [1], [{1: Logprob(-0.25)}])]))
    generation.append(RequestOutput(PROMPT, [Output(0, [2], None)]))
    ((first,), *_) = (frame.choices for frame in engine_frames.decode(call_.flush()))
    assert (first.ids, first.logprobs) == (pack_ids([1, 2]), None)
    generation.append(
        RequestOutput(PROMPT, [Output(0, [3], [{9: Logprob(-0.5)}])])
    )  # not the sampled one's
    assert engine_frames.decode(call_.flush())[0].choices[0].logprobs is None
    generation.append(RequestOutput(PROMPT, [Output(0, [4], [{4: Logprob(-1 / 3)}])]))
    logprobs = engine_frames.decode(call_.flush())[0].choices[0].logprobs
    assert logprobs is not None
    assert unpack_logprobs(logprobs) == pytest.approx([-1 / 3], rel=2**-24)
    generation.append(RequestOutput(PROMPT, [Output(0, [], None, "abort", [Span("v1", 0, 4)])]))
    assert engine_frames.decode(call_.flush()) == [
        Frame(0, None, (Choice(0, b"", b"", "abort", (("v1", 0, 4),)),))
    ]
    assert call_.flush() == b""


@pytest.mark.parametrize(
    ("params", "constraints"),
    [
        (Params(structured_outputs=Structured(json="{}")), ["json"]),
        (
            Params(structured_outputs=Structured(json_object=True), logit_bias={1: 2.0}),
            ["json_object", "logit_bias"],
        ),
        (
            Params(allowed_token_ids=[1], bad_words=["x"], min_tokens=3),
            ["allowed_token_ids", "bad_words", "min_tokens"],
        ),
        (Params(thinking_token_budget=0), ["thinking_token_budget"]),
        (Params(logit_bias={}, watermarking=True), []),
    ],
)
def test_what_limits_the_sampling_is_told(params: Params, constraints: list[str]) -> None:
    headers, body = call(App(params))
    (frame,) = engine_frames.split(body, headers[engine_frames.OWN_BODY])[1]
    assert frame.sampling is not None and frame.sampling.constraints == tuple(constraints)


def test_what_the_server_does_to_every_request_is_told() -> None:
    client = Client(
        model_config=ModelConfig("raw_logprobs", ["a.b:C"]),
        vllm_config=VllmConfig(object()),
    )
    found = sampling_of(Params(), server_options(client))
    assert (found.constraints, found.logprobs_mode) == (
        ("logits_processors", "watermark"),
        "raw_logprobs",
    )
    assert sampling_of(Params(watermarking=False), server_options(client)).constraints == (
        "logits_processors",
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", [BEAM_SEARCH, EMBEDDINGS])
def test_beam_search_and_embeddings_say_why_they_have_no_tokens(reason: str, stream: bool) -> None:
    if reason == BEAM_SEARCH:
        app = App(*[Params(max_tokens=1, detokenize=False, logprobs=4)] * 4, stream=stream)
        app.request_id = "cmpl-1-0a-beam-3"
    else:
        app = App(Params(), prompt={"type": "embeds"}, stream=stream)
    headers, body = call(app)
    if stream:
        (frames,) = (
            engine_frames.read_comment(event)
            for event in body.split(b"\n\n")
            if engine_frames.is_comment(event)
        )
    else:
        _, frames = engine_frames.split(body, headers[engine_frames.OWN_BODY])
    assert frames == [Frame(0, None, (), reason)]


def test_a_request_that_is_only_called_like_a_beam_is_captured() -> None:
    app = App(Params())
    app.request_id = "chatcmpl-my-beam-3"
    headers, body = call(app)
    assert engine_frames.split(body, headers[engine_frames.OWN_BODY])[1][0].choices == (whole(0),)


def test_a_client_that_leaves_closes_the_generation_at_once() -> None:
    async def leave() -> bool:
        client = Client()
        tap = EngineTap(client)
        _call.set(Call())
        outputs = tap.generate("prompt", Params(), "r")
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        return client.closed

    assert asyncio.run(leave())


# ---------------------------------------------------------------- exact continuation


class Renderer:
    """What the middleware needs of vLLM's renderer; its tokenizer is of no known family."""

    tokenizer = VocabularyOnly()

    async def render_chat_async(self, conversations: Any, *given: Any, **more: Any) -> Any:
        return conversations, [{"type": "token", "prompt_token_ids": PROMPT} for _ in conversations]


class ChatParams:
    chat_template_kwargs: MutableMapping[str, Any] = {}  # noqa: RUF012 - as vLLM's


class ChatApp(App):
    """Reads its body, renders once, and generates."""

    def __init__(self, *params: Params, stream: bool) -> None:
        super().__init__(*params, stream=stream)
        self.client.renderer = Renderer()  # type: ignore[attr-defined]
        self.body = b""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            self.body, more = self.body + message["body"], message["more_body"]
        assert (await receive())["type"] == "http.disconnect"
        await self.client.renderer.render_chat_async([[]], ChatParams())  # type: ignore[attr-defined]
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asking", [False, True])
def test_a_request_that_continues_reaches_the_app_without_the_ids(
    asking: bool, stream: bool
) -> None:
    app = ChatApp(Params(output_kind=Kind.FINAL_ONLY), stream=stream)
    own = b'{"messages":[]}'
    field = json.dumps(engine_frames.prior_fields(engine_frames.Prior("qwen3", b"", b"")))
    whole = own[:-1] + b"," + field.encode().replace(b'": ', b'":')[1:]
    incoming = [
        {"type": "http.request", "body": whole[:20], "more_body": True},
        {"type": "http.request", "body": whole[20:], "more_body": False},
        {"type": "http.disconnect"},
    ]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return incoming.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    names = [engine_frames.ASK, *([engine_frames.CONTINUE] if asking else [])]
    headers = [(name.encode(), b"1") for name in names]
    scope = {"type": "http", "path": "/v1/chat/completions", "app": app, "headers": headers}
    asyncio.run(Capture(app)(scope, receive, send))
    assert app.body == (own if asking else whole)
    body = b"".join(message.get("body", b"") for message in sent)
    if stream:
        frames = engine_frames.read_comment(body.split(b"\n\n")[0] + b"\n\n")
    else:
        found = dict(sent[0]["headers"])
        _, frames = engine_frames.split(body, found[engine_frames.OWN_BODY.encode()].decode())
    assert [frame.rendered for frame in frames] == ["unknown_template" if asking else None]

"""The pure parts of the gateway: events, session keys, workers, the chat dialect, steps."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.disconnect import Client
from gateway.errors import BadRequest, ClientGone, UpstreamFailed, WrongKey
from gateway.openai_chat import OpenAIChat
from gateway.protocol import Answer, Choice, Request
from gateway.scripted_engine import Say, Script, chunks, plain
from gateway.sessions import Origin, SessionKeys, origin_of, secret_of
from gateway.sse import Splitter, data_of
from gateway.steps import Call, Engine, steps_of
from gateway.workers import Worker, WorkerTable, choose, suited
from schemas.events import WorkerStatus
from schemas.settings import Settings
from schemas.tokens import unpack_ids

# ---------------------------------------------------------------- server-sent events


@given(st.lists(st.binary(min_size=1, max_size=12).filter(lambda b: b"\n" not in b and b"\r" not in b)), st.data())
def test_events_come_out_whole_however_they_come_in(lines: list[bytes], data: st.DataObject) -> None:
    ends = [data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"])) for _ in lines]
    stream = b"".join(b"data: " + line + end for line, end in zip(lines, ends, strict=True))
    splitter, out, at = Splitter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 9))
        out += splitter.feed(stream[at : at + size])
        at += size
    assert out == [b"data: " + line + end for line, end in zip(lines, ends, strict=True)]
    assert [data_of(event) for event in out] == lines


def test_data_of_other_events() -> None:
    assert data_of(b": comment\n\n") is None
    assert data_of(b"event: ping\ndata: 1\ndata:2\n\n") == b"1\n2"


# ---------------------------------------------------------------- session keys


def test_session_key_says_what_was_minted_and_nothing_else() -> None:
    keys, origin = SessionKeys(b"secret"), Origin("run-1", "t:1", "task über", "val")
    key = keys.mint(origin)
    assert key.startswith("sk-claw-") and keys.read(key) == origin
    assert keys.read(keys.mint(Origin("r", "t", None, None))) == Origin("r", "t", None, None)
    for wrong in (
        key[:-1],
        key + "A",
        key.replace("sk-claw-", "sk-claw-A"),
        "sk-claw-",
        "sk-claw-..",
        key.split(".")[0],
    ):
        with pytest.raises(WrongKey):
            keys.read(wrong)
    with pytest.raises(WrongKey):
        SessionKeys(b"other").read(key)


def test_secret_is_made_once_for_all_gateways_of_a_directory(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "d")
    secret = secret_of(settings)
    assert secret == secret_of(settings) and len(secret) > 30
    assert stat.S_IMODE((tmp_path / "d/session-secret").stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["session-secret"]
    assert secret_of(Settings.model_validate({"gateway": {"session_secret": "given"}})) == b"given"


def test_where_a_request_belongs() -> None:
    keys = SessionKeys(b"s")
    bearer = {"authorization": "Bearer " + keys.mint(Origin("r", "t", "g", "val"))}
    assert origin_of({}, keys, "d", "t1", "g1") == Origin("d", "t1", "g1", None)
    assert origin_of({"x-clawstream-run": "x", "x-clawstream-channel": "val"}, keys, "d", "t1", "g1") == Origin(
        "x", "t1", "g1", "val"
    )
    assert origin_of(bearer, keys, "d") == Origin("r", "t", "g", "val")
    assert origin_of(bearer | {"x-clawstream-channel": "train"}, keys, "d") == Origin("r", "t", "g", "train")
    assert origin_of(bearer, keys, "d", "t2", "g2") == Origin("r", "t2", "g2", "val")
    assert origin_of(bearer, keys, "d", "t") == Origin("r", "t", "g", "val")
    assert origin_of({"authorization": "Bearer sk-other"}, keys, "d", "t1", "g1") == Origin("d", "t1", "g1", None)
    with pytest.raises(WrongKey):
        origin_of({}, keys, "d")
    with pytest.raises(BadRequest, match="trajectory key"):
        origin_of({}, keys, "d", "a,b", "g")


# ---------------------------------------------------------------- workers


def status(name: str, state: Any = "ready", **more: Any) -> WorkerStatus:
    fields: dict[str, Any] = {
        "worker_id": name, "base_url": f"http://{name}/v1/", "models": ("policy",), "state": state, "heartbeat_at": 0,
        "heartbeat_interval_ms": 2000, "started_at": 0, "loads": 0,
    }  # fmt: skip
    return WorkerStatus(**fields | more)


def test_workers_come_and_go() -> None:
    table = WorkerTable(["http://static:1/v1"])
    table.hear("a", status("a"), 0.0)
    table.hear("b", status("b", "loading"), 0.0)
    names = [w.name for w in table.ready(0.0)]
    assert names == ["http://static:1/v1", "a"]
    assert [w.base_url for w in table.ready(0.0)] == ["http://static:1", "http://a"]
    assert [w.name for w in table.ready(6.0)] == names  # three heartbeats of 2 s
    assert [w.name for w in table.ready(6.1)] == ["http://static:1/v1"]
    table.hear("a", status("a"), 7.0)
    table.hear("b", status("b"), 7.0)
    assert len(table.ready(7.0)) == 3
    table.hear("a", status("a", "draining"), 7.5)
    table.hear("b", None, 7.5)
    assert [w.name for w in table.ready(7.5)] == ["http://static:1/v1"]


@given(st.integers(2, 6), st.text(max_size=20))
def test_a_trajectory_stays_with_its_worker_when_another_leaves(n: int, key: str) -> None:
    workers = [Worker(f"w{i}", f"http://w{i}") for i in range(n)]
    chosen = choose(workers, key, {})
    assert chosen is not None
    for gone in workers:
        if gone is not chosen:
            assert choose([w for w in workers if w is not gone], key, {}) == chosen


def test_a_crowded_worker_gives_way() -> None:
    workers = [Worker("a", ""), Worker("b", "")]
    affine = choose(workers, "k", {})
    assert affine is not None
    other = next(w for w in workers if w is not affine)
    assert choose(workers, "k", {affine.name: 2}) == affine
    assert choose(workers, "k", {affine.name: 3}) == other
    assert choose(workers, "k", {affine.name: 6, other.name: 3}) == affine
    assert choose(workers, "k", {affine.name: 7, other.name: 3}) == other
    assert choose([], "k", {}) is None


def test_trajectories_spread_over_workers() -> None:
    workers = [Worker(f"w{i}", "") for i in range(4)]
    counts: dict[str, int] = {}
    for i in range(2000):
        chosen = choose(workers, f"t{i}", {})
        assert chosen is not None
        counts[chosen.name] = counts.get(chosen.name, 0) + 1
    assert min(counts.values()) > 400


def test_run_and_model_narrow_the_choice_as_far_as_they_can() -> None:
    a = Worker("a", "", models=("policy",), run_id="r1")
    b = Worker("b", "", models=("policy", "judge"), run_id="r2")
    assert suited([a, b], "r1", "policy") == [a]
    assert suited([a, b], "r3", "judge") == [b]
    assert suited([a, b], "r3", None) == [a, b]
    assert suited([a, b], "r1", "unknown") == [a]


# ---------------------------------------------------------------- chat dialect

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hé"}]}
ADDED = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
HI = Say([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
FUNCTION = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_the_clients_own_bytes_stay_as_they_are() -> None:
    body = b'{ "messages": [],  "seed": 123456789012345678901234567890, "top_p": 1.0e0 }\n'
    sent = OpenAIChat().request(body).body
    assert sent.startswith(body.rstrip()[:-1])
    assert json.loads(sent) == json.loads(body) | ADDED


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({}, ADDED),
        ({"logprobs": True}, {"return_token_ids": True}),
        ({"logprobs": True, "top_logprobs": 3, "return_token_ids": True}, {}),
        ({"logprobs": False, "return_token_ids": False}, ADDED),
        ({"logprobs": None, "top_logprobs": None}, ADDED),
        ({"top_logprobs": 3}, {"return_token_ids": True}),  # an error of the client's, which the engine shall tell
        ({"logprob_token_ids": [1]}, {"return_token_ids": True}),
    ],
)
def test_tokens_are_asked_for_unless_the_client_does(said: dict[str, Any], added: dict[str, Any]) -> None:
    request = OpenAIChat().request(orjson.dumps(ASK | said))
    assert json.loads(request.body) == ASK | said | added
    assert request.keep_logprobs == bool(said.get("logprobs"))
    assert request.keep_ids == bool(said.get("return_token_ids"))


says = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.text(max_size=3))), min_size=1, max_size=5).map(
        lambda tokens: Say([i for i, _ in tokens], [t for _, t in tokens], [-float(i) for i, _ in tokens])
    ),
    min_size=1,
    max_size=3,
)


@given(says, st.booleans(), st.booleans(), st.data())
def test_stream_tells_the_client_what_it_asked_for_and_us_everything(
    script: list[Say], logprobs: bool, ids: bool, data: st.DataObject
) -> None:
    ask = ASK | {"stream": True, "n": len(script), "logprobs": logprobs, "return_token_ids": ids}
    dialect = OpenAIChat()
    request = dialect.request(orjson.dumps(ask))

    def written(body: dict[str, Any]) -> bytes:
        parts = [b"data: " + orjson.dumps(c) + b"\n\n" for c in chunks(body, Script(script))]
        return b"".join(parts) + b"data: [DONE]\n\n"

    incoming, stream, out, at = written(json.loads(request.body)), dialect.stream(request), b"", 0
    while at < len(incoming):
        size = data.draw(st.integers(1, 400))
        out += stream.feed(incoming[at : at + size])
        at += size
    assert stream.ended and stream.failure is None
    assert b'"finish_reason":"' not in out and b"[DONE]" not in out
    sent = sum(len(c.token_ids or ()) for c in stream.sent().choices)
    assert sent < sum(len(say.ids) for say in script)
    answer = stream.whole()
    assert out + stream.held() == written(ask)
    for choice, say in zip(answer.choices, script, strict=True):
        assert (choice.token_ids, choice.logprobs) == (list(say.ids), list(say.logprobs))
        assert json.loads(choice.message_json) == {"role": "assistant", "content": say.text}
    assert answer.prompt_ids == [1, 2, 3]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"choices":3}', b'{"choices":[{}]}', b'{"choices":[1]}'])
def test_what_is_no_reply_is_an_error_of_the_engine(body: bytes) -> None:
    dialect = OpenAIChat()
    with pytest.raises(UpstreamFailed):
        dialect.answer(dialect.request(orjson.dumps(ASK)), body, None)


@pytest.mark.parametrize("event", [b"{", b"[]", b"1", b'{"choices":[{"index":0}]}', b'{"choices":[7]}'])
def test_what_is_no_chunk_ends_the_stream_in_an_error(event: bytes) -> None:
    dialect = OpenAIChat()
    stream = dialect.stream(dialect.request(orjson.dumps(ASK | {"stream": True})))
    assert stream.feed(b"data: " + event + b"\n\n") == b""
    assert stream.failure is not None and stream.ended
    assert b'"upstream_failed"' in stream.held()


def test_a_stream_that_ends_too_early_is_a_failure() -> None:
    dialect = OpenAIChat()
    stream = dialect.stream(dialect.request(orjson.dumps(ASK | {"stream": True})))
    stream.feed(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
    stream.close()
    assert stream.failure is not None and "before 1 of 1" in stream.failure


# ---------------------------------------------------------------- steps


def a_call(**more: Any) -> Call:
    request = Request(model="m", stream=False, n=1, body=b"", keep_logprobs=False, keep_ids=False)
    fields: dict[str, Any] = {
        "origin": Origin("r", "t", "g", None), "call_id": "t~1", "protocol": "openai.chat", "request": request,
        "body": b"{}", "gateway_id": "gw", "received_at": 1,
    }  # fmt: skip
    return Call(**fields | more)


def one_step(ids: Any = (5, 6), logprobs: Any = (-1.0, -2.0), prompt: Any = (1,), spans: Any = None) -> Any:
    choice = Choice(0, b"{}", "stop", ids, logprobs, spans)
    (step,) = steps_of(a_call(), Answer((choice,), prompt, "m", b""), Engine("w", "r/1.0"), "ok", 2)
    return step


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"ids": None}, "the engine gave no response token ids"),
        ({"logprobs": None}, "the engine gave no log-probabilities"),
        ({"logprobs": [-1.0]}, "1 log-probabilities for 2 token ids"),
        ({"prompt": None}, "the engine gave no prompt token ids"),
        ({"ids": [2**40, 1]}, "the engine's token ids or log-probabilities are not numbers"),
        ({"ids": ["a", 1]}, "the engine's token ids or log-probabilities are not numbers"),
        ({"logprobs": [None, -1.0]}, "the engine's token ids or log-probabilities are not numbers"),
        ({"prompt": [1.5]}, "the engine's prompt token ids are not 32-bit integers"),
    ],
)
def test_step_without_tokens_says_why(said: dict[str, Any], reason: str) -> None:
    step = one_step(**said)
    assert step.tokens_absent_reason.startswith(reason)
    assert step.response_logprobs is None or said.keys() == {"prompt"}


def test_no_tokens_at_all_are_tokens_too() -> None:
    step = one_step(ids=[], logprobs=[], spans=[])
    assert (step.response_token_ids, step.response_logprobs, step.tokens_absent_reason) == (b"", b"", None)
    assert unpack_ids(step.prompt_token_ids) == [1]


@pytest.mark.parametrize(
    "spans",
    [
        None, "x", [{"version": "r/1.0", "start": 0, "end": 1}], [{"version": "r/1.0", "start": 1, "end": 2}],
        [{"version": "r/1.0", "start": 0, "end": 3}], [{"start": 0, "end": 2}], [None],
        [{"version": "r/1.0", "start": 0, "end": 1}, {"version": "r/1.0", "start": 0, "end": 2}],
    ],
)  # fmt: skip
def test_spans_that_do_not_cover_the_tokens_are_not_recorded(spans: Any) -> None:
    step = one_step(spans=spans)
    assert step.versions == () and step.version_first == "r/1.0" and step.version_last is None


def test_plain_and_streamed_replies_give_the_same_message_and_tokens() -> None:
    dialect = OpenAIChat()
    for say in (HI, Say([1, 2], ["a", "b"], [-1.0, -2.0], tool_calls=[FUNCTION])):
        whole = dialect.request(orjson.dumps(ASK))
        answer = dialect.answer(whole, orjson.dumps(plain(json.loads(whole.body), Script([say]))), None)
        assert answer.choices[0].token_ids == list(say.ids)
        assert orjson.loads(answer.body) == plain(ASK, Script([say]))


# ---------------------------------------------------------------- a client that leaves


def test_leaving_cancels_what_is_awaited_and_only_that() -> None:
    async def body() -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        client = Client(receive)
        async with client:
            await asyncio.sleep(0)
        assert not client.gone
        with pytest.raises(ClientGone):
            async with client:
                left.set()
                await asyncio.sleep(60)
        await asyncio.sleep(0)  # nothing is left over that would cancel us
        with pytest.raises(ClientGone):
            await client.__aenter__()

    asyncio.run(body())


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def body() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        async def work() -> None:
            client = Client(receive)
            try:
                async with client:
                    await asyncio.sleep(60)
            finally:
                client.done()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())

"""No request gets a 500: schemathesis on the OpenAPI page, and almost valid bodies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from support.examples import examples
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.errors import BadRequest
from clawstream.gateway.protocols.base import EngineKind
from clawstream.gateway.protocols.request_fields import renamed
from clawstream.schemas.codec.single_object import Codec

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
FEW = settings(
    max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck), database=None
)
MANY = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "policy", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "policy", "prompt": "hi", "max_tokens": 3},
    "/v1/responses": {
        "model": "policy",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    },
    "/v1/messages": {
        "model": "policy",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    },
    "/submit_steps": {
        "steps": [{"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t", "reward": 0.5}]
    },
    "/rewards": {
        "trajectory_id": "t",
        "source": "env",
        "name": "x",
        "function_version": "1",
        "value": 1.0,
    },
    "/curations": {"trajectory_id": "t", "quality": "good"},
    "/sessions": {"group_id": "g"},
    "/t/g/v1/complete_trajectory": {"reward": 1.0},
}


@contextmanager
def serving(home: Path, kind: EngineKind, **limits: Any) -> Iterator[str]:
    """URL of a whole gateway in a thread, its engine scripted."""
    said: Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def scenario(w: GatewayFixture) -> None:
        over = asyncio.Event()
        said.put((w.url, asyncio.get_running_loop(), over))
        await over.wait()

    thread = threading.Thread(
        target=run_gateway,
        args=(home, Codec(), scenario, lambda _: Script([HI]), kind),
        kwargs=limits,
    )
    thread.start()
    url, loop, over = said.get(timeout=300)
    yield url
    loop.call_soon_threadsafe(over.set)
    thread.join(60)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("gateway"), "captured") as url:
        yield url


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that changes what it asks its engine, a stock vLLM, and counts prompts before."""
    limits = {"max_prompt_tokens": 600, "default_max_tokens": 5}
    with serving(tmp_path_factory.mktemp("strict"), "vllm", **limits) as url:
        yield url


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_operation_of_the_page_fails(gateway: str, mode: GenerationMode) -> None:
    httpx.get(
        gateway + "/openapi.json", timeout=60
    )  # it is made once, and schemathesis waits less for it
    page = schemathesis.openapi.from_url(gateway + "/openapi.json")
    found = [result.ok() for result in page.get_all_operations()]
    assert len(found) > 25
    for operation in found:
        if mode is GenerationMode.NEGATIVE and not list(operation.body):
            continue  # nothing in it could be wrong

        @FEW
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Any) -> None:
            reply = case.call(base_url=gateway, timeout=60)
            assert reply.status_code != 500, f"{case.method} {case.path}: {reply.text[:300]}"

        call()


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(p for key, part in inner for p in places(part, (*path, key)))]


def with_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at a place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_at(value[path[0]], path[1:], new)
    return copy


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_no_nearly_right_body_fails(gateway: str, http: httpx.Client, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(CALLS)))
    body: Any = dict(CALLS[path]) | data.draw(
        st.sampled_from([{}, {"stream": True}, {"n": 2}, {"logprobs": True}])
    )
    for _ in range(data.draw(st.integers(1, 2))):
        body = with_at(body, data.draw(st.sampled_from(places(body))), data.draw(json))
    try:
        written = orjson.dumps(body)
    except (TypeError, ValueError):
        written = repr(body).encode()
    cut = data.draw(st.integers(0, len(written))) if data.draw(st.booleans()) else len(written)
    reply = http.post(
        gateway + path, content=written[:cut], headers={"content-type": "application/json"}
    )
    assert reply.status_code != 500, f"{path} {written[:cut]!r}: {reply.text[:300]}"


@MANY
@given(path=st.sampled_from(sorted(CALLS)), body=st.binary(max_size=200))
def test_no_garbage_fails(gateway: str, http: httpx.Client, path: str, body: bytes) -> None:
    reply = http.post(gateway + path, content=body)
    assert reply.status_code != 500, f"{path} {body!r}: {reply.text[:300]}"


HERE = "here-comes-something-odd"
DEPTHS = st.sampled_from([100, 253, 254, 255, 256, 300, 980, 1010, 1023, 1025, 2000])
ODD = st.one_of(
    DEPTHS.map(lambda depth: "[" * depth + "]" * depth),
    DEPTHS.map(lambda depth: '{"a":' * depth + "1" + "}" * depth),
    st.sampled_from([
        r'"\ud800"', r'"a\udfff"', r'{"\ud800":1}', r'["\ud83d"]', "9" * 400, "-" + "9" * 40,
        "1e400", "NaN", "Infinity", "-Infinity",
        "18446744073709551616", "1e-400", '"' + "x" * 3000 + '"', "-0.0", r'"\u0000"',
    ]),
)  # fmt: skip
OF_CALLS: tuple[dict[str, Any], ...] = (
    {"model": "default"},
    {"logprobs": None},
    {"return_token_ids": False},
    {"max_tokens": 3},
    {"stream": True},
    {"metadata": {"user_id": "u"}},
    {"x": 1},
    {"trajectory_id": "t"},
    {"detail": {"a": 1}},
    {"reason": "r"},
    {"note": "n"},
    {"by": "b"},
    {"tags": ["t"]},
    {"run_id": "r"},
    {"step_id": "s"},
)
"""What is added to a body, so that it is read or changed in another way."""


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_no_odd_value_fails(
    gateway: str, strict: str, http: httpx.Client, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(CALLS)))
    body: Any = dict(CALLS[path])
    for added in data.draw(st.lists(st.sampled_from(OF_CALLS), max_size=3)):
        body |= added
    body |= data.draw(st.sampled_from([{}, {"x": 1}]))
    at = data.draw(st.sampled_from([place for place in places(body) if place]))
    written = orjson.dumps(with_at(body, at, HERE)).replace(
        b'"%s"' % HERE.encode(), data.draw(ODD).encode()
    )
    for url in (gateway, strict):
        reply = http.post(url + path, content=written, headers={"content-type": "application/json"})
        assert reply.status_code != 500, f"{path} {at} {written[:300]!r}: {reply.text[:300]}"


def test_values_that_once_failed(gateway: str, strict: str, http: httpx.Client) -> None:
    deep = b"[" * 300 + b"]" * 300
    said = b'"messages":[{"role":"user","content":"hi"}]'
    cases: list[tuple[str, bytes, int | None, str | None]] = [
        ("/v1/chat/completions", b'{"model":"default",%b,"x":%b}' % (said, deep), 400, "body"),
        (
            "/v1/chat/completions",
            b'{"model":"policy","logprobs":null,%b,"x":%b}' % (said, deep),
            None,
            "body",
        ),
        (
            "/v1/responses",
            b'{"model":"policy","input":[{"role":"user","content":%b}]}' % deep,
            400,
            "body",
        ),
        ("/v1/completions", b'{"model":"policy","prompt":%b}' % deep, 400, "body"),
        ("/sessions", rb'{"group_id":"\ud800"}', 400, "body"),
        ("/sessions", rb'{"run_id":"\ud800"}', 400, "body"),
        ("/sessions", rb'{"trajectory_key":"\ud800"}', 400, "body"),
        ("/sessions", rb'{"metadata":{"a":"\ud800"}}', 400, "body"),
        ("/sessions", rb'{"\ud800":1}', 400, "body"),
        ("/t/g/complete_trajectory", rb'{"reason":"\ud800"}', 400, "body"),
        ("/curations", rb'{"trajectory_id":"t","tags":["\ud800"],"by":"x"}', 400, "body"),
        ("/curations", rb'{"trajectory_id":"t","note":"\ud800","by":"x"}', 400, "body"),
        ("/curations", rb'{"trajectory_id":"t","quality":1,"by":"\ud800"}', 400, "body"),
    ]
    for path, body, status, param in cases:
        for url in (gateway, strict):
            reply = http.post(
                url + path, content=body, headers={"content-type": "application/json"}
            )
            assert reply.status_code == status or (
                status is None and reply.status_code in (200, 400)
            ), reply.text
            assert (
                reply.status_code == 200 or param is None or reply.json()["error"]["param"] == param
            ), reply.text


def test_a_call_too_deep_to_be_renamed_is_refused() -> None:
    assert renamed(b'{"model":"a","x":%b}' % (b"[" * 300 + b"]" * 300), "b").startswith(
        b'{"model":"b"'
    )
    with pytest.raises(BadRequest, match="deep"):
        renamed(b'{"model":"a","x":%b}' % (b"[" * 3000 + b"]" * 3000), "b")

"""No request whatever is a 500: what the OpenAPI page allows and forbids (schemathesis), and bodies that are nearly right."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
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

from gateway.scripted import Say, Script
from gateway.trial import Trial, play
from schemas.codec import Codec

HI = Say([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
CALLS = {
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
    "/submit_steps": {"steps": [{"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t", "reward": 0.5}]},
    "/rewards": {"trajectory_id": "t", "source": "env", "name": "x", "function_version": "1", "value": 1.0},
    "/curations": {"trajectory_id": "t", "quality": "good"},
    "/sessions": {"group_id": "g"},
    "/t/g/v1/complete_trajectory": {"reward": 1.0},
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a whole gateway in a thread, its engine scripted."""
    home: Path = tmp_path_factory.mktemp("gateway")
    said: Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def scenario(w: Trial) -> None:
        over = asyncio.Event()
        said.put((w.url, asyncio.get_running_loop(), over))
        await over.wait()

    thread = threading.Thread(target=play, args=(home, Codec(), scenario, lambda _: Script([HI])))
    thread.start()
    url, loop, over = said.get(timeout=60)
    yield url
    loop.call_soon_threadsafe(over.set)
    thread.join(60)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_operation_of_the_page_fails(gateway: str, mode: GenerationMode) -> None:
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
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, part in inner for p in places(part, (*path, key)))]


def with_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at a place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_at(value[path[0]], path[1:], new)
    return copy


@MANY
@given(data=st.data())
def test_no_nearly_right_body_fails(gateway: str, http: httpx.Client, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(CALLS)))
    body: Any = dict(CALLS[path]) | data.draw(st.sampled_from([{}, {"stream": True}, {"n": 2}, {"logprobs": True}]))
    for _ in range(data.draw(st.integers(1, 2))):
        body = with_at(body, data.draw(st.sampled_from(places(body))), data.draw(json))
    try:
        written = orjson.dumps(body)
    except (TypeError, ValueError):
        written = repr(body).encode()
    cut = data.draw(st.integers(0, len(written))) if data.draw(st.booleans()) else len(written)
    reply = http.post(gateway + path, content=written[:cut], headers={"content-type": "application/json"})
    assert reply.status_code != 500, f"{path} {written[:cut]!r}: {reply.text[:300]}"


@MANY
@given(path=st.sampled_from(sorted(CALLS)), body=st.binary(max_size=200))
def test_no_garbage_fails(gateway: str, http: httpx.Client, path: str, body: bytes) -> None:
    reply = http.post(gateway + path, content=body)
    assert reply.status_code != 500, f"{path} {body!r}: {reply.text[:300]}"

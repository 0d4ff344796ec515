"""Recorded provider replies pass unchanged, and records equal what the official client has.

One gateway and one replay server (a provider of kind `text`, without tokens) serve all cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest
from support.corpus import CORPUS, PATHS, Case, Clients, Seen, cases, replaying, reply
from support.gateway import running
from support.log_producer import InMemoryLogProducer

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import FailedCall, Step
from clawstream.schemas.settings import Settings

CASES = cases()
ADDED = frozenset({"parsed", "parsed_arguments", "parsed_output"})


class Outcome(NamedTuple):
    """A case, straight and through the gateway."""

    straight: Seen
    through: Seen
    raw: bytes
    steps: list[Step]
    failed: list[FailedCall]
    named: list[str]
    """The steps that the header of a raw call names, and its records."""
    raw_records: list[Step | FailedCall]


async def outcomes(directory: Path) -> dict[str, Outcome]:
    """All cases, one after the other."""
    made = {
        case.name: reply(case.data, "text/event-stream" if case.stream else "application/json")
        for case in CASES
    }
    codec, producer, found = Codec(), InMemoryLogProducer(), {}
    async with replaying(made) as engine:
        said = {"upstreams": [{"url": engine, "kind": "text"}], "worker_wait_s": 60}
        settings = Settings.model_validate({"data_dir": directory, "gateway": said})
        app = create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), codec)
        async with running(app) as gateway, aiohttp.ClientSession() as http, Clients() as clients:
            for case in CASES:
                url = f"{gateway}/{case.trajectory}/g"
                straight, through = await clients.seen(case, engine), await clients.seen(case, url)
                body = case.request() | ({"stream": True} if case.stream else {})
                path = f"/raw-{case.trajectory}/g{PATHS[case.protocol]}"
                async with http.post(gateway + path, json=body) as got:
                    raw = await got.read()
                    named = got.headers.get("x-clawstream-step", "").split(",")
                records, raw_records = (
                    [codec.decode(m.value) for m in producer.messages if m.key == key.encode()]
                    for key in (case.trajectory, f"raw-{case.trajectory}")
                )
                found[case.name] = Outcome(
                    straight,
                    through,
                    raw,
                    [r for r in records if isinstance(r, Step)],
                    [r for r in records if isinstance(r, FailedCall)],
                    [name for name in named if name],
                    raw_records,
                )
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    yield asyncio.run(outcomes(tmp_path_factory.mktemp("corpus")))


def test_the_manifest_names_every_file() -> None:
    files = {str(p.relative_to(CORPUS)) for p in CORPUS.glob("*/*")}
    assert files == {case.name for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_client_sees_the_same_through_the_gateway(case: Case, played: dict[str, Outcome]) -> None:
    outcome = played[case.name]
    assert outcome.raw == case.data
    assert outcome.through == outcome.straight
    assert outcome.straight.parts or outcome.straight.error or case.data.startswith(b"data: [DONE]")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_record_is_what_the_client_has(case: Case, played: dict[str, Outcome]) -> None:
    outcome = played[case.name]
    if case.failed is not None:
        (failed,) = outcome.failed
        source, status, message = case.failed
        assert (outcome.steps, failed.source, failed.status) == ([], source, status)
        assert failed.message.startswith(message)
        return
    recorded: list[Any] = [orjson.loads(step.response_json) for step in outcome.steps]
    if case.recorded is None:
        assert outcome.straight.error is None
        assert _told(recorded) == _told(outcome.straight.messages)
    else:
        assert outcome.straight.messages != case.recorded, (
            "the client can say it: leave `recorded` out"
        )
        assert recorded == case.recorded
    assert {step.finish_reason for step in outcome.steps} <= {case.finish}
    status = case.status or ("ok" if case.finish else "error")
    assert {step.status for step in outcome.steps} <= {status}
    if case.usage is not None:
        usage = outcome.steps[0].usage
        assert usage is not None and case.usage == [
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
        ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_answer_leaves_steps_or_a_failed_call(case: Case, played: dict[str, Outcome]) -> None:
    outcome = played[case.name]
    assert bool(outcome.steps) != bool(outcome.failed)
    steps = [r.step_id for r in outcome.raw_records if isinstance(r, Step)]
    assert bool(outcome.named) == bool(steps) and set(outcome.named) <= set(steps)
    assert len(outcome.raw_records) == (len(steps) or 1)


def _told(value: Any) -> Any:
    """Return a message without empty fields and without fields that client helpers add."""
    if isinstance(value, dict):
        return {
            name: _told(inner)
            for name, inner in value.items()
            if inner is not None and name not in ADDED
        }
    return [_told(inner) for inner in value] if isinstance(value, list) else value

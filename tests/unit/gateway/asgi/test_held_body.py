"""What a body counts in flight: its bytes, and the values that parsing it makes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tracemalloc
from collections.abc import MutableMapping
from typing import Any

import cramjam
import pytest

from clawstream.gateway.asgi.in_flight_limits import InFlightLimits
from clawstream.gateway.asgi.messages import VALUE_BYTES, HeldBody
from clawstream.gateway.asgi.request_encoding import RequestDecoder
from clawstream.gateway.errors import BodyTooLarge, Overloaded


async def held_for(body: bytes, limits: InFlightLimits) -> int:
    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async with HeldBody(receive, 1 << 20, limits) as read:
        assert read == body
        return limits.held


@pytest.mark.parametrize(
    ("body", "values"), [(b"", 0), (b'"a text"', 0), (b'[1,2,{"a":[]}]', 5), (b"{}", 1)]
)
def test_a_body_counts_with_its_values(body: bytes, values: int) -> None:
    limits = InFlightLimits(1 << 20, 9, 9)
    assert asyncio.run(held_for(body, limits)) == len(body) + VALUE_BYTES * values
    assert limits.held == 0


def test_a_small_zstd_body_takes_no_memory_for_a_large_one() -> None:
    body = b'{"text": "' + b"a" * 1000 + b'"}'

    async def receive() -> MutableMapping[str, Any]:
        packed = bytes(cramjam.zstd.compress(body))
        return {"type": "http.request", "body": packed, "more_body": False}

    decoder = RequestDecoder(64 << 20, InFlightLimits(1 << 20, 9, 9))
    tracemalloc.start()
    try:
        assert asyncio.run(decoder.decoded(receive, "zstd")())["body"] == body  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_body_that_never_fits_is_too_large_and_others_wait() -> None:
    limits = InFlightLimits(10_000, 9, 9)
    with pytest.raises(BodyTooLarge, match="max_in_flight_bytes=10000"):
        asyncio.run(held_for(b"[" * 200, limits))
    limits.reserve(5_000)
    with pytest.raises(Overloaded):
        asyncio.run(held_for(b"[" * 100, limits))
    assert limits.held == 5_000


GROWTH = """
import resource, sys
import orjson
from clawstream.gateway.asgi.messages import VALUE_BYTES
body = eval(sys.argv[1])
counted = len(body) + VALUE_BYTES * (body.count(b",") + body.count(b"[") + body.count(b"{"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kept = orjson.loads(body)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / counted)
"""
BODIES = (
    "b'[' + b'[],' * 300_000 + b'1]'",
    "b'[' + b'{\"a\":[]},' * 150_000 + b'1]'",
    "b'[' + b'\"ab\",' * 300_000 + b'1]'",
    "b'[' + (b'[' * 200 + b']' * 200 + b',') * 5000 + b'1]'",
    "b'\"' + b'x' * 8_000_000 + '\\U0001f600'.encode() + b'\"'",
)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_a_parsed_body_needs_at_most_a_few_times_what_it_counts(body: str) -> None:
    """docs/durability.md says six times for a whole call."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, body], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 4.0

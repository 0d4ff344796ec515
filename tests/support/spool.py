"""Read and write spools in a directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from support.log_producer import InMemoryLogProducer

from clawstream.gateway.durability.blobs import Blobs
from clawstream.gateway.durability.delivery import DeliveryManager
from clawstream.gateway.durability.log import Message
from clawstream.gateway.durability.segment import read_segment
from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.durability.spool_frames import frame_bytes
from clawstream.gateway.metrics import Metrics

Body = Callable[[DeliveryManager, InMemoryLogProducer, Spool], Awaitable[None]]


def note(n: int, key: bytes = b"k") -> Message:
    return Message("t", key, b"%d" % n)


def size_of(message: Message) -> int:
    """Return the bytes that a record takes in a segment."""
    return frame_bytes(message)


def records_in(path: Path) -> list[Message]:
    """Return the readable records of a segment."""
    return read_segment(path).messages


def open_spool(directory: Path, max_bytes: int = 1 << 20, segment_bytes: int = 200) -> Spool:
    spool = Spool(directory, max_bytes, segment_bytes)
    spool.open()
    return spool


def append(spool: Spool, *items: Message) -> None:
    spool.append(items)


def drain(spool: Spool) -> list[Message]:
    out = []
    while (found := spool.first()) is not None:
        out += found[1]
        spool.remove(found[0])
    return out


def delivery(
    directory: Path,
    body: Body,
    max_bytes: int = 1 << 20,
    metrics: Metrics | None = None,
    acks: Literal["all", "none"] = "all",
    blobs: Blobs | None = None,
) -> InMemoryLogProducer:
    """Run body over a started delivery manager, close it, and return the producer."""

    async def run() -> InMemoryLogProducer:
        producer, spool = InMemoryLogProducer(), Spool(directory, max_bytes)
        it = DeliveryManager(producer, spool, metrics or Metrics(), acks, blobs)
        await it.start()
        await body(it, producer, spool)
        await it.close()
        return producer

    return asyncio.run(run())


def sample(metrics: Metrics, name: str) -> float:
    """Return the value of a gateway metric."""
    value = metrics.registry.get_sample_value(f"clawstream_gateway_{name}")
    assert value is not None, name
    return value


def files(directory: Path) -> list[Path]:
    return list(directory.glob("*.spool"))


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

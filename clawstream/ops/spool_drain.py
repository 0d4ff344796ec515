"""`clawstream spool drain`: send a gateway's quarantined or abandoned spool to Kafka.

1. Lock the directory of quarantined segments; also the whole spool when its gateway does not run.
2. From the oldest segment on, ask the lake for its records and send the missing ones in order.
3. Remove the segment once all are acknowledged. After a crash it is sent again with the same ids.

The readable part of a damaged segment (`clawstream.gateway.durability.quarantine`) is sent; the
file stays for manual repair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from clawstream.gateway.durability.blobs import Blobs
from clawstream.gateway.durability.log import Message
from clawstream.gateway.durability.quarantine import (
    DAMAGED,
    QUARANTINED,
    Damage,
    bytes_in,
    damaged_in,
    move_to,
    reject,
)
from clawstream.gateway.durability.segment import read_segment, segments_in
from clawstream.gateway.durability.spool import lock
from clawstream.gateway.errors import GatewayError, RecordTooLarge, RecordUnfit, SpoolTaken
from clawstream.runtime.blob_store import BlobStore
from clawstream.runtime.topics.records import cluster_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.settings import Settings


class Drained(NamedTuple):
    """The result for one gateway's spool.

    runs: The gateway runs, so only its quarantined segments were read. damaged: What is unreadable.
    """

    gateway_id: str
    sent: int
    in_lake: int
    runs: bool
    damaged: list[Damage]


def drain(settings: Settings, gateway_id: str | None = None) -> Iterator[Drained]:
    """Drain all spools, or that of `gateway_id`; yield one result per gateway.

    Raises GatewayError and errors of lake and Kafka; records sent before are not lost.
    """
    root, names = settings.spool_dir, _gateways(settings)
    if gateway_id is not None and gateway_id not in names:
        raise GatewayError(
            f"no spool of {gateway_id} in {root}: there is {', '.join(names) or 'none'}"
        )
    for name in names if gateway_id is None else [gateway_id]:
        with _taken(root / name) as (paths, runs):
            sent, known = _send(settings, root / name, paths)
        yield Drained(name, sent, known, runs, damaged_in(root / name))


class Spooled(NamedTuple):
    """Bytes of the segments in the spools of all gateways of this directory."""

    waiting: int
    quarantined: int
    damaged: int


def spooled(settings: Settings) -> Spooled | None:
    """Return what the spools hold; None without a spool. Raises GatewayError."""
    try:
        roots = [settings.spool_dir / name for name in _gateways(settings)]
    except OSError as error:
        raise GatewayError(f"spool {settings.spool_dir}: {error}") from error
    if not roots:
        return None
    places = ("", QUARANTINED, DAMAGED)
    return Spooled(*(sum(bytes_in(root / place) for root in roots) for place in places))


def damaged(settings: Settings) -> list[Damage]:
    """Return the damaged segments of all gateways in this spool directory. Raises GatewayError."""
    try:
        return [
            found for name in _gateways(settings) for found in damaged_in(settings.spool_dir / name)
        ]
    except OSError as error:
        raise GatewayError(f"spool {settings.spool_dir}: {error}") from error


def _gateways(settings: Settings) -> list[str]:
    root = settings.spool_dir
    return sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


def _send(settings: Settings, directory: Path, paths: Sequence[Path]) -> tuple[int, int]:
    """Send the records of segments that the lake lacks.

    Returns:
        The number of records sent, and the number of records that were already in the lake.
    """
    from clawstream.stream_jobs.lake.lookup import check_not_behind

    cluster, gateway = cluster_of(settings), settings.gateway
    store = BlobStore(settings.blob_uri, gateway.blob_options)
    blobs = Blobs(store, Codec(), gateway.produce_timeout_s)
    sent = known = 0
    checked: set[str] = set()
    producer = cluster.producer()
    try:
        for path in paths:
            messages, unreadable_bytes, _ = read_segment(path)
            for topic in {m.topic for m in messages} - checked:
                check_not_behind(settings, cluster, topic)
                checked.add(topic)
            missing = _missing(settings, messages)
            for message in missing:
                try:
                    (fitting,) = blobs.fit_now([message])
                except (RecordTooLarge, RecordUnfit):
                    reject(directory, message)
                else:
                    producer.put(*fitting)
            producer.flush()
            if unreadable_bytes:
                move_to(DAMAGED, directory, path)
            else:
                path.unlink()
            sent, known = sent + len(missing), known + len(messages) - len(missing)
    finally:
        producer.close()
    return sent, known


def _missing(settings: Settings, messages: Sequence[Message]) -> list[Message]:
    """Return the records that the lake lacks. Unreadable ones count: it dead-letters them."""
    from clawstream.stream_jobs.lake.lookup import in_lake

    codec, events = Codec(), list[Any]()
    for message in messages:
        try:
            events.append(codec.decode(message.value))
        except (Undecodable, UnknownSchema):
            events.append(None)
    there = in_lake(settings, events)
    return [m for m, found in zip(messages, there, strict=True) if not found]


@contextmanager
def _taken(directory: Path) -> Iterator[tuple[list[Path], bool]]:
    """Lock the segments; yield them, oldest first, and whether the gateway runs."""
    with ExitStack() as stack:
        try:
            stack.callback(os.close, lock(directory / QUARANTINED))
        except SpoolTaken as error:
            raise SpoolTaken(
                f"spool {directory} is just being drained by another `clawstream spool drain`"
            ) from error
        runs = False
        paths = [p for name in (QUARANTINED, DAMAGED) for p in segments_in(directory / name)]
        try:
            stack.callback(os.close, lock(directory))
            paths += segments_in(directory)
        except SpoolTaken:
            runs = True
        yield sorted(paths, key=lambda path: path.name), runs

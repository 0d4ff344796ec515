"""The payload of candidates on `claw.trajectories`: its place, and reading it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from clawstream.runtime.kafka import Cluster, SourceTruncated
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import Candidate, Place, Trajectory
from clawstream.schemas.records.trajectory_parts import joined

_PLACE = ("topic_id", "partition", "first_offset", "last_offset")


def payload_place(headers: Mapping[str, bytes]) -> Place | None:
    """Return the place of a candidate's payload from its headers; None when it has no payload.

    Raises:
        ValueError: The headers are not four complete values.
    """
    if not any(name in headers for name in _PLACE):
        return None
    try:
        topic_id, partition, first, last = (headers[name].decode("ascii") for name in _PLACE)
        return Place(
            topic_id=topic_id,
            partition=int(partition),
            first_offset=int(first),
            last_offset=int(last),
        )
    except (KeyError, ValueError) as e:
        raise ValueError(f"headers {', '.join(_PLACE)}: {e!r} in {dict(headers)}"[:500]) from e


def read_payload(
    cluster: Cluster, decoder: Decoder, topic: str, candidate: Candidate, place: Place
) -> Trajectory | str:
    """Return the trajectory of a candidate, or the reason why it is gone.

    Args:
        cluster: The installation's Kafka.
        decoder: Of the installation's records.
        topic: `claw.trajectories`.
        candidate: Whose trajectory is read.
        place: Of its payload.

    Raises:
        Unavailable: Kafka does not answer.
    """
    first, last = place.first_offset, place.last_offset
    where = f"payload at {topic}-{place.partition} offsets {first} to {last}"
    if cluster.topic_id(topic) != place.topic_id:
        return f"{where} is lost: the topic was recreated"
    parts = dict[int, Trajectory]()
    try:
        for record in cluster.read_range(topic, place.partition, first, last):
            with suppress(Undecodable, UnknownSchema):  # the lake writes the dead letter
                part = decoder.decode(record.value)
                if isinstance(part, Trajectory) and (
                    (part.run_id, part.trajectory_id) == (candidate.run_id, candidate.trajectory_id)
                ):
                    parts.setdefault(part.part, part)
    except SourceTruncated as e:
        return f"{where} is lost: {e}"
    expected = next(iter(parts.values())).parts if parts else 1
    if len(parts) < max(1, expected):
        return f"{where} is lost: {len(parts)} of {expected} parts can be read"
    return joined([parts[i] for i in sorted(parts)])

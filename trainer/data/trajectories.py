"""Read the trajectories of a batch from the log by offset.

Each scan reads one range per partition, all partitions at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from clawstream.runtime.kafka import READ_TIMEOUT_S, Cluster, Record, SourceTruncated, Unavailable
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import BatchMember, ReadyBatch, Trajectory
from clawstream.schemas.records.trajectory_parts import joined
from clawstream.trainer.errors import PayloadUnreadable

GAP_RECORDS = 500
"""Number of records of other batches that a scan reads over before it starts another scan.

Reading them costs about as much as a new scan.
"""

Range = tuple[int, int]


def read_payload(
    cluster: Cluster, decoder: Decoder, topic: str, group: str, batch: ReadyBatch
) -> dict[str, Trajectory]:
    """Return trajectory id to trajectory for every member.

    Raises:
        PayloadUnreadable: a member is gone. No member is ever left out.
    """
    members = [member for g in batch.groups for member in g.members]
    topic_id = cluster.topic_id(topic)
    for member in members:
        if member.place.topic_id != topic_id:
            raise PayloadUnreadable(
                f"{_where(topic, batch, member)} is in topic id {member.place.topic_id}, but "
                f"{topic} was recreated and has id {topic_id}: the payload is lost"
            )
    wanted = {member.trajectory_id for member in members}
    parts: dict[str, dict[int, Trajectory]] = {}
    for scan in scans(members):
        try:
            for record in _scan(cluster, topic, group, scan):
                part = _trajectory(decoder, record)
                if (
                    part is not None
                    and part.trajectory_id in wanted
                    and part.run_id == batch.run_id
                ):
                    parts.setdefault(part.trajectory_id, {}).setdefault(part.part, part)
        except SourceTruncated as e:
            raise PayloadUnreadable(
                f"batch {batch.batch_seq}: {topic} no longer has the offsets {scan}, by retention "
                f"or a lost disk: {e}"
            ) from e
    return {
        member.trajectory_id: _whole(topic, batch, member, parts.get(member.trajectory_id, {}))
        for member in members
    }


def scans(members: Iterable[BatchMember]) -> list[dict[int, Range]]:
    """Return the (first, last offset) of each partition for each scan.

    The number of scans is the minimum for the gaps; each scan has one range per partition.
    """
    by_partition: dict[int, list[Range]] = {}
    for place in sorted((m.place for m in members), key=lambda p: (p.partition, p.first_offset)):
        ranges = by_partition.setdefault(place.partition, [])
        if ranges and place.first_offset - ranges[-1][1] <= GAP_RECORDS:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], place.last_offset))
        else:
            ranges.append((place.first_offset, place.last_offset))
    rounds = max(map(len, by_partition.values()), default=0)
    return [
        {p: ranges[i] for p, ranges in by_partition.items() if i < len(ranges)}
        for i in range(rounds)
    ]


def _scan(cluster: Cluster, topic: str, group: str, scan: Mapping[int, Range]) -> list[Record]:
    """Read every committed record of the ranges; wait up to 30 s for records not yet readable."""
    reader = cluster.reader(group, {(topic, p): first for p, (first, _) in scan.items()})
    found: list[Record] = []
    deadline = time.monotonic() + READ_TIMEOUT_S
    try:
        while any(reader.positions[topic, p] <= last for p, (_, last) in scan.items()):
            batch = reader.poll(2000, 0.1)
            found += (r for r in batch if r.offset <= scan[r.partition][1])
            if batch:
                deadline = time.monotonic() + READ_TIMEOUT_S
            elif time.monotonic() > deadline:
                raise Unavailable(
                    f"{topic}: {dict(scan)} could not be read within {READ_TIMEOUT_S:g} s"
                )
    finally:
        reader.close()
    return found


def _trajectory(decoder: Decoder, record: Record) -> Trajectory | None:
    """Return the trajectory part in a record; None for any other record.

    The lake reads all records of the topic and dead-letters the unreadable ones.
    """
    try:
        event = decoder.decode(record.value)
    except (Undecodable, UnknownSchema):
        return None
    return event if isinstance(event, Trajectory) else None


def _whole(
    topic: str, batch: ReadyBatch, member: BatchMember, parts: Mapping[int, Trajectory]
) -> Trajectory:
    expected = next(iter(parts.values())).parts if parts else 1
    missing = [i for i in range(expected) if i not in parts]
    if missing:
        raise PayloadUnreadable(
            f"{_where(topic, batch, member)}: part {missing[0]} of {expected} is missing or can't "
            "be decoded"
        )
    return joined([parts[i] for i in range(expected)])


def _where(topic: str, batch: ReadyBatch, member: BatchMember) -> str:
    place = member.place
    return (
        f"batch {batch.batch_seq}: trajectory {member.trajectory_id} at {topic}-{place.partition} "
        f"offsets {place.first_offset} to {place.last_offset}"
    )

"""Split a batch by the environments of its groups. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import orjson

from clawstream.schemas.records import BatchGroup, ReadyBatch, Trajectory


def environment_of(trajectory: Trajectory) -> str | None:
    """Return the environment that the metadata names; None without one.

    Metadata of more than a megabyte may be in the blob store, which is not read here.
    """
    try:
        match orjson.loads(trajectory.metadata_json or b"null"):
            case {"environment": str(name)}:
                return name
    except orjson.JSONDecodeError:
        pass
    return None


def by_environment(
    batch: ReadyBatch, trajectories: Mapping[str, Trajectory], names: Collection[str]
) -> dict[str | None, ReadyBatch]:
    """Return the batch of each environment; None: of all other groups.

    The members of a group have one task, so a group is in the environment of its first member.

    Args:
        batch: the batch.
        trajectories: trajectory id to trajectory, for every member.
        names: environments to split off.

    Returns:
        Only batches with groups; the others first, then in the order of the names.
    """
    if not names:
        return {None: batch}
    groups: dict[str | None, list[BatchGroup]] = {name: [] for name in (None, *names)}
    for group in batch.groups:
        environment = environment_of(trajectories[group.members[0].trajectory_id])
        groups[environment if environment in names else None].append(group)
    return {name: replace(batch, groups=tuple(found)) for name, found in groups.items() if found}

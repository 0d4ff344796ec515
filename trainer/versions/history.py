"""Derive from the weights log: the next ids, the ancestors of a version, deletable versions.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from schemas.ids import Version
from schemas.records import WeightVersion

ALWAYS_KEPT = 2
"""A worker may still load the newest but one, and a resume needs it when the newest is damaged."""


def version_of(record: WeightVersion) -> Version:
    """Return the parsed version id of a manifest."""
    return Version(record.run_id, record.sync_index, record.attempt)


def next_attempt(taken: Iterable[Version]) -> int:
    """Return one above the highest existing attempt; 0 for a run without any."""
    return max((version.attempt for version in taken), default=-1) + 1


def next_sync_index(sync_index: int, next_batch_seq: int, sync_every: int) -> int:
    """Sync index of the version after one with `sync_index`, whose next batch is next_batch_seq.

    It rises by one at each multiple of sync_every, so it is floor(batch_seq / sync_every) + 1 of
    its batches: what admission judges staleness by. A version published in between (the trainer was
    stopped) is followed by one of the same sync index; their attempts differ.
    """
    return sync_index + (1 if next_batch_seq % sync_every == 0 else 0)


def ancestors(versions: Sequence[WeightVersion], current_version: str) -> list[WeightVersion]:
    """Return `current_version` and its ancestors, newest first."""
    by_id = {version.version_id: version for version in versions}
    found: list[WeightVersion] = []
    at: str | None = current_version
    while at is not None and at in by_id:
        found.append(by_id.pop(at))
        at = found[-1].parent_version
    return found


def deletable(
    versions: Sequence[WeightVersion], current_version: str, keep: int
) -> Collection[Version]:
    """Return versions (log order) whose files may be deleted.

    Keeps the newest `keep` of the log and of the current version's ancestors, and the bases of kept
    deltas.
    """
    keep = max(keep, ALWAYS_KEPT)
    kept = {v.version_id for v in (*versions[-keep:], *ancestors(versions, current_version)[:keep])}
    by_id = {v.version_id: v for v in versions}
    for version_id in tuple(kept):
        base = by_id[version_id].base_version
        while base is not None and base in by_id and base not in kept:
            kept.add(base)
            base = by_id[base].base_version
    return frozenset(version_of(v) for v in versions if v.version_id not in kept)

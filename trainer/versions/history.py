"""Derive from the weights log: the next ids, the ancestors of a version, deletable versions.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from clawstream.schemas.ids import Version
from clawstream.schemas.records import WeightVersion

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


def best(versions: Sequence[WeightVersion], metric: str | None) -> WeightVersion | None:
    """Return the version with the highest value of a metric, the first in order among equals.

    None without a metric, or when no version has it.
    """
    measured = [v for v in versions if metric is not None and metric in v.metrics]
    return max(measured, key=lambda v: v.metrics[metric or ""], default=None)


def deletable(
    versions: Sequence[WeightVersion],
    existing: Collection[Version],
    current_version: str,
    keep: int,
    best_by: str | None = None,
) -> Collection[Version]:
    """Return versions whose files may be deleted.

    Keeps the newest `keep` of the log and of the current version's ancestors, the best existing
    ancestor by the metric `best_by`, and the bases of kept deltas.

    Args:
        versions: in log order.
        existing: versions with files. The value of a metric may change, so a version whose files
            are deleted may become the best one of the log.
        current_version: the newest version.
        keep: number of versions.
        best_by: a metric, or None.
    """
    keep, chain = max(keep, ALWAYS_KEPT), ancestors(versions, current_version)
    found = best([v for v in chain if version_of(v) in existing], best_by)
    kept = {v.version_id for v in (*versions[-keep:], *chain[:keep])}
    kept |= {found.version_id} if found is not None else set()
    by_id = {v.version_id: v for v in versions}
    for version_id in tuple(kept):
        base = by_id[version_id].base_version
        while base is not None and base in by_id and base not in kept:
            kept.add(base)
            base = by_id[base].base_version
    return frozenset(version_of(v) for v in versions if v.version_id not in kept)


def deletable_checkpoints(
    versions: Sequence[WeightVersion],
    existing: Collection[Version],
    current_version: str,
    keep: int,
    best_by: str | None = None,
) -> Collection[Version]:
    """Return versions whose checkpoints may be deleted.

    Keeps the newest `keep` of the current version's ancestors, and of all their checkpoints the
    best by the metric `best_by`. Checkpoints of abandoned versions are deletable, those of
    other logs are not.

    Args:
        versions: in log order.
        existing: versions with a checkpoint. The newest may be incomplete: a copy in progress.
        current_version: the newest version.
        keep: number of checkpoints.
        best_by: a metric, or None.
    """
    chain = [v for v in ancestors(versions, current_version) if version_of(v) in existing]
    kept = [*chain[: max(keep, ALWAYS_KEPT)], best(chain, best_by)]
    mine = {version_of(v) for v in versions} & set(existing)
    return frozenset(mine - {version_of(v) for v in kept if v is not None})

"""The trainer's stored positions, for `clawstream doctor`: of each run, the newest checkpoint. Reads only, and needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runtime.doctor import StoredPosition
from runtime.kafka import Cluster
from runtime.records import Decoder
from schemas.ids import Version
from schemas.settings import Settings
from trainer.errors import InvalidCheckpoint
from trainer.ledger import read_versions
from trainer.version_dir import read_info, versions_in


def positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """Position of the checkpoint that each run resumes from; of a run whose versions are on no log any more, of its newest one."""
    root = settings.checkpoint_dir
    runs = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    return [found for run in runs for found in _of_run(settings, cluster, root, run)]


def _of_run(settings: Settings, cluster: Cluster, root: Path, run: str) -> Iterator[StoredPosition]:
    topics = settings.kafka.topics
    directories = versions_in(root, run)
    if not directories:
        return
    published: list[Version] = []
    if topics.weights in cluster.topics():
        versions, _ = read_versions(cluster, Decoder(cluster, topics.schemas), topics.weights, run)
        published = [v for w in versions if (v := Version(run, w.sync_index, w.attempt)) in directories]
    newest = published[-1] if published else max(directories, key=lambda v: (v.attempt, v.sync_index))
    what, batches = f"trainer checkpoint {newest}", topics.ready_batches(run, "train")
    try:
        info = read_info(directories[newest])
        position = info["position"]
        yield StoredPosition(what, batches, position["topic_id"], position["partition"], position["next_offset"])
        yield StoredPosition(f"{what}, published", topics.weights, info["weights_topic_id"], 0, 0)
    except (InvalidCheckpoint, KeyError, TypeError) as e:
        yield StoredPosition(what, batches, None, 0, 0, f"{directories[newest]}: {e!r}")

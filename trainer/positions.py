"""The trainer's stored positions, for `clawstream doctor`: of each run, the newest checkpoint. Reads only, and needs no torch."""

from __future__ import annotations

from runtime.doctor import StoredPosition
from runtime.kafka import Cluster
from schemas.settings import Settings
from trainer.errors import InvalidCheckpoint
from trainer.version_dir import read_info, versions_in

PROCESS = "trainer"


def positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """Of each run, position and weights log of the newest checkpoint: all ids rise, whatever log they were published on."""
    root, topics = settings.checkpoint_dir, settings.kafka.topics
    runs = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    found: list[StoredPosition] = []
    for run in runs:
        directories = versions_in(root, run)
        if not directories:
            continue
        newest = max(directories, key=lambda v: (v.attempt, v.sync_index))
        place, batches = f"checkpoint {newest}", topics.ready_batches(run, "train")
        try:
            info = read_info(directories[newest])
            at = info["position"]
            found.append(StoredPosition(PROCESS, place, batches, at["topic_id"], at["partition"], at["next_offset"]))
            found.append(StoredPosition(PROCESS, f"{place} is on", topics.weights, info["weights_topic_id"], 0, 0))
        except (InvalidCheckpoint, KeyError, TypeError) as e:
            found.append(StoredPosition(PROCESS, place, batches, None, 0, 0, f"{directories[newest]}: {e!r}"))
    return found

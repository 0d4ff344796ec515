"""The trainer's stored positions, for `clawstream doctor`: of each run, the newest checkpoint.

Reads only, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.kafka import Cluster
from runtime.topics.positions import StoredPosition
from schemas.settings import Settings
from trainer.errors import InvalidCheckpoint
from trainer.versions.atomic_directory import read_info, versions_in

PROCESS = "trainer"


def positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """Of each run, position and weights log of the newest checkpoint: all ids rise, whatever log
    they were published on.
    """
    root, topics = settings.checkpoint_dir, settings.kafka.topics
    runs = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    found: list[StoredPosition] = []
    ids = cluster.topic_ids([topics.weights, *(topics.ready_batches(run, "train") for run in runs)])
    for run in runs:
        directories = versions_in(root, run)
        if not directories:
            continue
        newest = max(directories, key=lambda v: (v.attempt, v.sync_index))
        place, batches = f"checkpoint {newest}", topics.ready_batches(run, "train")
        try:
            info = read_info(directories[newest])
            at = info["position"]
            flaw = _flaw(info, ids.get(batches), ids.get(topics.weights))
            found.append(
                StoredPosition(
                    PROCESS,
                    place,
                    batches,
                    at["topic_id"],
                    at["partition"],
                    at["next_offset"],
                    flaw,
                )
            )
            found.append(
                StoredPosition(
                    PROCESS, f"{place} is on", topics.weights, info["weights_topic_id"], 0, 0
                )
            )
        except (InvalidCheckpoint, KeyError, TypeError) as e:
            found.append(
                StoredPosition(PROCESS, place, batches, None, 0, 0, f"{directories[newest]}: {e!r}")
            )
    return found


def _flaw(info: Mapping[str, Any], batches_id: str | None, weights_id: str | None) -> str | None:
    """Why the trainer does not go on from a checkpoint whose batches were recreated
    (`trainer.data.batches.start_of`).
    """
    at = info["position"]
    if (
        info["weights_topic_id"] != weights_id
        or batches_id in (None, at["topic_id"])
        or not at["next_batch_seq"]
    ):
        return None
    return (
        f"weights were trained from {at['next_batch_seq']} batches of the topic that was there "
        f"before (id {at['topic_id']}): "
        "restore it, or train on under another run_id with trainer.model_path set to the published "
        "weights"
    )

"""The trainer's stored positions, for `status --positions` and `topics trim`.

They are those of the newest checkpoint of a run. Reads only, and needs no torch.
"""

from __future__ import annotations

from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.positions import StoredPosition
from clawstream.schemas.settings import Settings
from clawstream.trainer.errors import InvalidCheckpoint
from clawstream.trainer.versions.directory import VersionState, directory_of, read_info, versions_in

PROCESS = "trainer"


def positions(settings: Settings, cluster: Cluster) -> list[StoredPosition]:
    """Return position and weights log of each run's newest checkpoint, the one with the highest
    version id: ids rise also across weights logs.
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
            state = read_info(directory_of(root, newest)).state
        except InvalidCheckpoint as e:
            found.append(StoredPosition(PROCESS, place, batches, None, 0, 0, str(e)))
            continue
        at = state.position
        error = _error(state, ids.get(batches), ids.get(topics.weights))
        found += [
            StoredPosition(PROCESS, place, batches, at.topic_id, 0, at.next_offset, error),
            StoredPosition(PROCESS, f"{place} is on", topics.weights, state.weights_topic_id, 0, 0),
        ]
    return found


def resumes(settings: Settings, cluster: Cluster) -> dict[str, int]:
    """Return ready-batches topic to the offset from which its run's newest checkpoint goes on.

    Checkpoints on another machine, or of a topic that was recreated, are left out.
    """
    weights = settings.kafka.topics.weights
    found = [p for p in positions(settings, cluster) if p.error is None and p.topic != weights]
    ids = cluster.topic_ids(sorted({p.topic for p in found}))
    return {p.topic: p.offset for p in found if ids.get(p.topic) == p.topic_id}


def _error(state: VersionState, batches_id: str | None, weights_id: str | None) -> str | None:
    """Return why the trainer does not resume from a checkpoint whose batches were recreated
    (`clawstream.trainer.position.start_of`); None when it does.
    """
    at = state.position
    recreated = batches_id not in (None, at.topic_id)
    if state.weights_topic_id != weights_id or not recreated or not at.next_batch_seq:
        return None
    return (
        f"weights were trained from {at.next_batch_seq} batches of the topic that was there before "
        f"(id {at.topic_id}): restore it, or train on under another run_id with trainer.model_path "
        "set to the published weights"
    )

"""Publish weight versions: model files, their checksums, and the manifest that names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runtime.topics.records import now_micros
from schemas.records import WeightFile, WeightVersion
from trainer.model.files import TensorDtypes
from trainer.model.policy import Policy
from trainer.versions.directory import VersionState, directory_of, new_directory, read_info


def export(
    root: Path, state: VersionState, policy: Policy, dtypes: TensorDtypes
) -> tuple[WeightFile, ...]:
    """Publish the policy's model directory under `root`, its weights rounded to the served dtypes.

    Each file is hashed once. Every process must call this; the files are the leader's.
    """
    if not policy.processes.leads:
        policy.save(root, dtypes)
        return ()
    with new_directory(root, state) as tmp:
        policy.save(tmp, dtypes)
    final = directory_of(root, state.version)
    return tuple(
        WeightFile(
            url=(final / name).as_uri(), sha256=digest, size_bytes=(final / name).stat().st_size
        )
        for name, digest in sorted(read_info(final).files.items())
    )


def manifest(
    state: VersionState,
    first_batch_seq: int,
    files: tuple[WeightFile, ...],
    checkpoint: VersionState | None,
    metrics: Mapping[str, float],
    base_model: str | None,
) -> WeightVersion:
    """Return the record of a version.

    Its batches are those from first_batch_seq to its own position; there may be none.

    Args:
        state: of the version.
        first_batch_seq: first batch since the parent.
        files: from `export`.
        checkpoint: the newest complete checkpoint.
        metrics: of the version.
        base_model: digest of the model that an adapter belongs to; None: a full version.
    """
    last = state.position.next_batch_seq - 1
    trained = first_batch_seq <= last
    return WeightVersion(
        version_id=str(state.version),
        **state.version._asdict(),
        parent_version=state.parent_version,
        format="full" if base_model is None else "delta",
        base_model=base_model,
        files=files,
        checkpoint_version=str(checkpoint.version) if checkpoint else None,
        channel="train",
        batches_topic_id=state.position.topic_id,
        first_batch_seq=first_batch_seq if trained else None,
        last_batch_seq=last if trained else None,
        metrics=metrics,
        created_at=now_micros(),
    )

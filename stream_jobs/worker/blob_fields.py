"""Replace references to the blob store in a trajectory by the content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from clawstream.runtime.blob_store import BlobMissing
from clawstream.schemas.blob_refs import referenced
from clawstream.schemas.records import Trajectory


def resolve_blobs(trajectory: Trajectory, get: Callable[[str], bytes]) -> Trajectory:
    """Return the trajectory with complete metadata and replies.

    Args:
        get: SHA-256 (hex) to bytes.

    Raises:
        BlobMissing, BlobStoreAway: From `get`.
    """

    def whole(field: str, value: bytes) -> bytes:
        blob = referenced(field, value)
        if blob is None:
            return value
        data = get(blob.sha256)
        if len(data) != blob.size_bytes:
            raise BlobMissing(
                f"blob {blob.url} has {len(data)} bytes, not the {blob.size_bytes} of its reference"
            )
        return data

    metadata = trajectory.metadata_json
    fields = [
        ("metadata_json", metadata),
        *(("response_json", s.response_json) for s in trajectory.steps),
    ]
    if not any(referenced(field, value) for field, value in fields):
        return trajectory  # as a rule
    steps = [
        replace(s, response_json=whole("response_json", s.response_json)) for s in trajectory.steps
    ]
    return replace(
        trajectory,
        metadata_json=None if metadata is None else whole("metadata_json", metadata),
        steps=tuple(steps),
    )

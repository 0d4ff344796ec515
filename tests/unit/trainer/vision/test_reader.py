"""Which images of a batch are read, and what becomes of trajectories without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trainer_runs import add_turn_with_images, fetched

from clawstream.runtime.blob_store import BlobStore, BlobStoreAway
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.data.sequences import (
    BatchImages,
    BatchSequences,
    ReadableIds,
    sequences_of_batch,
)
from clawstream.trainer.vision.reader import ImageReader

IMAGE = 31
READABLE = ReadableIds(1000, {32}, {IMAGE})


def misfit(images: Any, ids: Any) -> str | None:
    """An image of n bytes has n placeholder tokens."""
    return None if sum(map(len, images)) == np.sum(ids == IMAGE) else "other placeholders"


def sequences(given: FetchedBatch, images: BatchImages) -> BatchSequences:
    return sequences_of_batch(
        given.batch, given.trajectories, 2, "trajectory", READABLE, images=images
    )


def test_images_are_read_by_digest_and_go_to_their_sequence(tmp_path: Path) -> None:
    store, given = BlobStore(str(tmp_path)), fetched(0)
    for image in (b"aa", b"bbb"):
        store.put(image)
    seen, other, *_ = given.trajectories
    add_turn_with_images(given, seen, [IMAGE] * 5, b"aa", b"bbb")
    add_turn_with_images(given, other, [IMAGE] * 2, b"aa")
    images = ImageReader(store, READABLE, misfit).read(given.batch, given.trajectories)
    assert images == BatchImages({(seen, 1): (b"aa", b"bbb"), (other, 1): (b"aa",)}, {})
    assert images.of_step[seen, 1][0] is images.of_step[other, 1][0], "in memory once"
    data = sequences(given, images)
    assert {s.trajectory_id: s.images for s in data.sequences if s.images} == {
        seen: (b"aa", b"bbb"),
        other: (b"aa",),
    }
    assert data.with_media == {} and len(data.sequences) == 6


@pytest.mark.parametrize(
    ("placeholders", "stored", "reason"),
    [(2, b"", "no blob"), (3, b"aa", "other placeholders")],
)
def test_without_its_images_a_trajectory_ends_before_the_first(
    tmp_path: Path, placeholders: int, stored: bytes, reason: str
) -> None:
    store, given = BlobStore(str(tmp_path)), fetched(0)
    store.put(stored)
    name = next(iter(given.trajectories))
    add_turn_with_images(given, name, [IMAGE] * placeholders, b"aa")
    images = ImageReader(store, READABLE, misfit).read(given.batch, given.trajectories)
    assert images.of_step == {} and reason in images.unusable[name]
    data = sequences(given, images)
    assert data.with_media == {name: 2}
    (cut,) = (s for s in data.sequences if s.trajectory_id == name)
    assert IMAGE not in cut.tokens.ids and cut.trained_tokens == 4


def test_text_needs_no_store_and_a_store_that_is_away_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    reader = ImageReader(BlobStore(str(tmp_path / "file" / "blobs")), READABLE, misfit)
    given = fetched(0)
    assert reader.read(given.batch, given.trajectories) == BatchImages({}, {})
    add_turn_with_images(given, next(iter(given.trajectories)), [IMAGE] * 2, b"aa")
    with pytest.raises(BlobStoreAway):
        reader.read(given.batch, given.trajectories)

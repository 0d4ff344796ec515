"""The age of blobs, and which ones are remembered; tests/unit/gateway/durability has the rest."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from clawstream.runtime.blob_store import RENEWED_S, BlobStore


class Clock:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_object_store_gets_an_existing_blob_again_only_when_it_is_old(tmp_path: Path) -> None:
    uri = f"memory://{tmp_path.name}"
    digest = BlobStore(uri).put(b"picture")
    kept = f"/{tmp_path.name}/{digest[:2]}/{digest}"
    MemoryFileSystem.store[kept].modified -= timedelta(seconds=RENEWED_S - 60)
    store = BlobStore(uri)
    store.put(b"picture")
    assert store.age_s(digest) > RENEWED_S - 90
    MemoryFileSystem.store[kept].modified -= timedelta(seconds=120)
    BlobStore(uri).put(b"picture")
    assert store.age_s(digest) < 60 and store.get(digest) == b"picture"


def test_a_store_remembers_a_blob_until_it_is_old(tmp_path: Path) -> None:
    uri, clock = f"memory://{tmp_path.name}", Clock()
    digest = BlobStore(uri).put(b"picture")
    kept = f"/{tmp_path.name}/{digest[:2]}/{digest}"
    MemoryFileSystem.store[kept].modified -= timedelta(seconds=600)
    store = BlobStore(uri, now=clock)
    store.put(b"picture")
    MemoryFileSystem.store.pop(kept)  # so that every write is seen
    clock.now += RENEWED_S - 600 - 10
    store.put(b"picture")
    assert store.age_s(digest) == float("inf")
    clock.now += 20
    store.put(b"picture")
    assert store.age_s(digest) < 60
    MemoryFileSystem.store.pop(kept)
    clock.now += RENEWED_S - 10
    store.put(b"picture")
    assert store.age_s(digest) == float("inf")


def test_a_store_forgets_the_blob_that_it_has_known_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawstream.runtime.blob_store.REMEMBERED", 2)
    store = BlobStore(str(tmp_path))
    first, *_ = (store.put(data) for data in (b"1", b"2", b"3"))
    (tmp_path / first[:2] / first).unlink()
    assert store.get(store.put(b"1")) == b"1"

"""The age of blobs in an object store; tests/unit/gateway/durability has the other tests."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from runtime.blob_store import RENEWED_S, BlobStore


def test_an_object_store_gets_an_existing_blob_again_only_when_it_is_old(tmp_path: Path) -> None:
    store = BlobStore(f"memory://{tmp_path.name}")
    digest = store.put(b"picture")
    kept = f"/{tmp_path.name}/{digest[:2]}/{digest}"
    MemoryFileSystem.store[kept].modified -= timedelta(seconds=RENEWED_S - 60)
    store.put(b"picture")
    assert store.age_s(digest) > RENEWED_S - 90
    MemoryFileSystem.store[kept].modified -= timedelta(seconds=120)
    store.put(b"picture")
    assert store.age_s(digest) < 60 and store.get(digest) == b"picture"

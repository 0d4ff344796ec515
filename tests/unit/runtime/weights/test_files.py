"""The files of a full version: checked, and downloaded where they are elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from clawstream.runtime.errors import WeightsUnreadable
from clawstream.runtime.weights.files import get_files, local_path
from clawstream.schemas.records import WeightFile


def of(url: str, data: bytes) -> WeightFile:
    return WeightFile(url=url, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def test_urls_of_this_machine() -> None:
    assert local_path("file:///a/with%20space") == Path("/a/with space")
    assert local_path("/a/b%20c") == Path("/a/b%20c")
    assert local_path("s3://bucket/a") is local_path("memory://a") is None


def test_a_manifest_is_checked_file_by_file(tmp_path: Path) -> None:
    path = tmp_path / "with space.safetensors"
    path.write_bytes(b"weights")
    file = of(path.as_uri(), b"weights")
    assert get_files([file], tmp_path) == {path: file.sha256}
    for damaged, problem in ((b"weighty", "the manifest says 7 with"), (b"weight", "6 bytes")):
        path.write_bytes(damaged)
        with pytest.raises(WeightsUnreadable, match=problem):
            get_files([file], tmp_path)
    path.unlink()
    with pytest.raises(WeightsUnreadable, match="No such file"):
        get_files([file], tmp_path)
    with pytest.raises(WeightsUnreadable, match="Input/output error"):  # address 0, a real one
        get_files([replace(file, url="file:///proc/self/mem", size_bytes=0)], tmp_path)


def test_files_elsewhere_are_downloaded_once(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/versions/model.safetensors", b"weights")
    file = of("memory://versions/model.safetensors", b"weights")
    (copy,) = get_files([file], tmp_path)
    assert copy.read_bytes() == b"weights"
    store.rm("/versions", recursive=True)
    assert get_files([file], tmp_path) == {copy: file.sha256}
    for url in ("memory://versions/other.safetensors", "nosuchscheme://x/y"):
        with pytest.raises(WeightsUnreadable, match=url):
            get_files([of(url, b"w")], tmp_path)


def test_a_damaged_or_short_download_leaves_nothing_and_is_repeated(tmp_path: Path) -> None:
    store, whole = fsspec.filesystem("memory"), b"all the weights"
    file = of("memory://early/model.safetensors", whole)
    for damaged in (whole[:9], b"other".ljust(len(whole))):
        store.pipe("/early/model.safetensors", damaged)
        with pytest.raises(WeightsUnreadable, match="the manifest says 15 with"):
            get_files([file], tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    store.pipe("/early/model.safetensors", whole)
    (copy,) = get_files([file], tmp_path)
    copy.write_bytes(whole[:9])  # damaged on this machine
    assert get_files([file], tmp_path) == {copy: file.sha256}
    assert copy.read_bytes() == whole


@pytest.mark.parametrize(
    ("url", "digest"),
    [
        ("memory://v/model.safetensors", "../../x"),
        ("memory://v/model.safetensors", "a" * 64 + "\n"),
        ("memory://v/model.safetensors", ""),
        ("memory://v/..", "a" * 64),
        ("memory://v/%2E%2E", "a" * 64),
        ("", "a" * 64),
    ],
)
def test_a_manifest_cannot_name_a_path_outside_the_cache(
    tmp_path: Path, url: str, digest: str
) -> None:
    with pytest.raises(WeightsUnreadable, match="not a file's"):
        get_files([WeightFile(url=url, sha256=digest, size_bytes=1)], tmp_path / "cache")
    with pytest.raises(WeightsUnreadable, match="null byte"):
        get_files([WeightFile(url="file:///%00", sha256="a" * 64, size_bytes=1)], tmp_path)
    assert not list(tmp_path.iterdir())

"""Test files that are either whole or absent."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from clawstream.runtime.atomic_file import create_durably, write_durably


def test_bytes_are_on_disk_before_their_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps, fsync = tmp_path / "f", list[str](), os.fsync

    def watched(fd: int) -> None:
        fsync(fd)
        what = "names" if stat.S_ISDIR(os.fstat(fd).st_mode) else "bytes"
        steps.append(f"{what}, old" if path.read_bytes() == b"old" else f"{what}, new")

    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched)
        write_durably(path, b"new", 0o600)
    assert steps == ["bytes, old", "names, new"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["f"]


def test_a_disk_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "f").write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_durably(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


def test_a_file_is_created_once(tmp_path: Path) -> None:
    create_durably(tmp_path / "f", b"first", 0o600)
    with pytest.raises(FileExistsError):
        create_durably(tmp_path / "f", b"second")
    assert (tmp_path / "f").read_bytes() == b"first" and os.listdir(tmp_path) == ["f"]
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600

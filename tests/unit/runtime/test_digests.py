"""The digest of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawstream.runtime.digests import digest_of_model


def test_models_with_other_weights_have_other_digests_whatever_their_format(tmp_path: Path) -> None:
    found = set()
    for name, content in (
        ("model.safetensors", b"a"),
        ("model.safetensors", b"b"),
        ("pytorch_model.bin", b"c"),
        ("pytorch_model-00001-of-00001.bin", b"d"),
    ):
        directory = tmp_path / f"{name}-{content.decode()}"
        directory.mkdir()
        (directory / "config.json").write_bytes(content)
        (directory / name).write_bytes(content)
        found.add(digest_of_model(directory))
    assert len(found) == 4


def test_a_directory_without_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"has no weights: none of \*\.safetensors"):
        digest_of_model(tmp_path)

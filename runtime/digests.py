"""Digests of files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SHA256 = r"\A[0-9a-f]{64}\Z"
"""Pattern of a SHA-256 in hex digits. Digests of others become paths only if they match."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex digits."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def safetensors_of_model(directory: Path) -> list[Path]:
    """Return the weight files of a Hugging Face directory, sorted; empty if it has none.

    Those that the index names, else `model.safetensors`, else all. The same weights in the format
    of another library, or an adapter, may lie beside them.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [directory / name for name in sorted(names)]
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def digest_of_model(directory: Path) -> str:
    """Return the digest of the weights in a model directory.

    SHA-256 of the concatenated SHA-256 digests (hex) of its safetensors files, in the order of
    their names; without any, of its `pytorch_model*.bin`.

    Raises:
        FileNotFoundError: there is no file of weights, or one that the index names is missing.
    """
    files = safetensors_of_model(directory) or sorted(directory.glob("pytorch_model*.bin"))
    if not files:
        raise FileNotFoundError(
            f"{directory} has no weights: none of *.safetensors, pytorch_model*.bin"
        )
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()

"""Digests of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHA256 = r"\A[0-9a-f]{64}\Z"
"""Pattern of a SHA-256 in hex digits. Digests of others become paths only if they match."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex digits."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def digest_of_model(directory: Path) -> str:
    """Return the digest of the weights in a model directory.

    SHA-256 of the concatenated SHA-256 digests (hex) of its safetensors files, in the order of
    their names; without any, of its `pytorch_model*.bin`.

    Raises:
        FileNotFoundError: there is no file of weights.
    """
    patterns = ("*.safetensors", "pytorch_model*.bin")
    files = next((found for p in patterns if (found := sorted(directory.glob(p)))), None)
    if files is None:
        raise FileNotFoundError(f"{directory} has no weights: none of {', '.join(patterns)}")
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()

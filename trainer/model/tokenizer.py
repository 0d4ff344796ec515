"""The tokenizer of a model directory: whether recorded token ids mean the same in it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from clawstream.runtime.logs import logger
from clawstream.schemas.tokens import fingerprint

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def tokenizer_fingerprint(directory: Path) -> str | None:
    """Return the fingerprint of a directory's tokenizer, as engines report theirs.

    Returns:
        None if there is none, or transformers cannot read it without code of the directory. Then
        nothing is known about it and no data is refused.
    """
    if not any((directory / name).is_file() for name in FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return fingerprint(tokenizer.get_vocab())
    except (OSError, ValueError, ImportError) as error:
        logger().warning(
            "tokenizer_unreadable",
            directory=str(directory),
            error=str(error),
            action="data of another tokenizer is not recognised",
        )
        return None

"""Decode token ids to text by a model's `tokenizer.json`.

This is the only file that imports tokenizers. It never runs code of a model's directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from clawstream.schemas.errors import SettingsError


class TextOf:
    """Decode with the tokenizer of a directory. Raises SettingsError when there is none."""

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(
                f"setting gateway.tokenizer_path: no {file}; "
                "give a directory in which a fast tokenizer was saved"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower type
            raise SettingsError(
                f"setting gateway.tokenizer_path: {file} cannot be read: {error}"
            ) from error

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens; unknown ids give no text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

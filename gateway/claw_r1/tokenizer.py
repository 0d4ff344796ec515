"""Token ids to text, by a model's `tokenizer.json`. The only file that imports tokenizers; no code of a model's directory ever runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from schemas.errors import SettingsError


class TextOf:
    """Decodes with the tokenizer of a directory. Raises SettingsError when there is none."""

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(
                f"setting gateway.tokenizer_path: no {file}; give a directory in which a fast tokenizer was saved"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more exact
            raise SettingsError(
                f"setting gateway.tokenizer_path: {file} cannot be read: {error}"
            ) from error

    def __call__(self, ids: Sequence[int]) -> str:
        """The text, without special tokens; ids that the tokenizer does not know give none."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

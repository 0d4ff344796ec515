"""Texts of token ids, by the tokenizer that a weight version was published with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from clawstream.runtime.logs import logger

FILE = "tokenizer.json"
_QUERY = """SELECT files FROM weights_raw WHERE run_id = split_part($version, '/', 1)
    ORDER BY version_id = $version DESC, kafka_timestamp DESC LIMIT 20"""
"""The version, then the newest of its run: files of old versions are deleted."""


class TokenTexts:
    """Looks up tokenizers once: of the settings, else `tokenizer.json` of a weight version.

    Args:
        rows: runs a query over the lake.
        directory: with `tokenizer.json`; None: only those of the weight versions.
    """

    def __init__(
        self,
        rows: Callable[[str, Mapping[str, Any]], list[dict[str, Any]]],
        directory: Path | None,
    ) -> None:
        self._rows, self._directory = rows, directory
        self._known: dict[str | None, Any] = {}

    def __call__(self, version: str | None, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None without a tokenizer for the version."""
        if version not in self._known:
            self._known[version] = self._open(version)
        tokenizer = self._known[version]
        return None if tokenizer is None else [_text(tokenizer, i) for i in ids]

    def _open(self, version: str | None) -> Any:
        path = next((p for p in self._paths(version) if p.is_file()), None)
        if path is None:
            return None
        try:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))
        except Exception as e:  # noqa: BLE001 - the library raises Exception itself; ids are shown then
            logger().warning("tokenizer_unreadable", file=str(path), error=str(e))
            return None

    def _paths(self, version: str | None) -> list[Path]:
        if self._directory is not None:
            return [self._directory / FILE]
        found = self._rows(_QUERY, {"version": version}) if version else []
        urls = [urlsplit(f["url"]) for row in found for f in row["files"] or ()]
        return [Path(unquote(u.path)) for u in urls if u.scheme == "file" and u.path.endswith(FILE)]


def _text(tokenizer: Any, token: int) -> str:
    """Return the text of one token; its name in the vocabulary if it is only a part of a letter."""
    name = tokenizer.id_to_token(token)
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    if name is None:
        return f"<{token}>"
    if "\ufffd" in text or not text:
        return str(name)
    space = name.startswith("▁") and not text.startswith(" ")  # stripped from a single token
    return f" {text}" if space else text

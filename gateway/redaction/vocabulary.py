"""A model's tokenizer, as far as redaction needs it: the bytes of each token id, and the ids of a text. The only file of the gateway's
redaction that imports tokenizers, and only when a step with token ids comes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_TRANSPARENT = frozenset(("Fuse", "Strip", "ByteFallback", "Metaspace", "Replace"))
"""Decoders that change nothing within a text but what `_Pieces` does."""


class TokenizerUnusable(ValueError):
    """The tokenizer cannot be read, or not in a way that tells the bytes of each token."""


class UnknownToken(ValueError):
    """A token id that the tokenizer does not have: it is another model's."""


class Vocabulary:
    """pieces: the bytes of each id, None for ids that are none. special: ids that stand for no text, e.g. the end of a turn."""

    def __init__(
        self, tokenizer: Any, pieces: Sequence[bytes | None], special: frozenset[int]
    ) -> None:
        self._tokenizer, self._pieces = tokenizer, pieces
        self.special = special

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """From a tokenizer.json or the directory that holds one. Takes a second. Raises TokenizerUnusable."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            said = orjson.loads(file.read_bytes())
            within = {
                name: _within_a_text(said.get(name)) for name in ("normalizer", "pre_tokenizer")
            }
            tokenizer = Tokenizer.from_buffer(orjson.dumps(said | within))
        except MemoryError:
            raise
        except (
            Exception
        ) as error:  # the library raises nothing more exact, and the file may be anything
            raise TokenizerUnusable(f"{file}: {type(error).__name__}: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # what a text says is text, whatever it looks like
        read = _Pieces(said.get("decoder"), str(file))
        added = tokenizer.get_added_tokens_decoder()
        vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        pieces: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, number in vocabulary.items():
            pieces[number] = token.encode() if number in added else read(token)
        return cls(
            tokenizer, pieces, frozenset(number for number, token in added.items() if token.special)
        )

    def spell(self, packed: bytes) -> tuple[Sequence[bytes], bytes]:
        """The bytes of each token, and all of them, from packed ids. Raises UnknownToken."""
        ids = struct.unpack(
            f"<{len(packed) // 4}I", packed
        )  # unsigned: a negative one is out of range too
        try:
            pieces: Any = (
                itemgetter(*ids)(self._pieces) if len(ids) > 1 else [self._pieces[n] for n in ids]
            )
            return pieces, b"".join(pieces)
        except (IndexError, TypeError) as error:
            known = len(self._pieces)
            wrong = next(n for n in ids if n >= known or self._pieces[n] is None)
            raise UnknownToken(f"token id {wrong} is not in the tokenizer") from error

    def encode(self, text: bytes) -> list[int]:
        """The ids of a text that stands within another one. Bytes that are no UTF-8 become U+FFFD."""
        ids: list[int] = self._tokenizer.encode(
            text.decode("utf-8", "replace"), add_special_tokens=False
        ).ids
        return ids


class _Pieces:
    """Reads a token of the vocabulary as the tokenizer's decoder would, alone and without losing a byte."""

    def __init__(self, decoder: Any, where: str) -> None:
        steps = list(_flat(decoder))
        kinds = {step["type"] for step in steps}
        if not steps or kinds - _TRANSPARENT - {"ByteLevel"}:
            raise TokenizerUnusable(
                f"{where}: a decoder of {sorted(kinds) or 'no kind'} does not tell the bytes of a token"
            )
        self._bytes = _byte_letters() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._replace = [
            (step.get("replacement", "▁"), " ") for step in steps if step["type"] == "Metaspace"
        ]
        self._replace += [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]

    def __call__(self, token: str) -> bytes:
        if self._bytes is not None:
            return b"".join(self._bytes.get(letter) or letter.encode() for letter in token)
        if self._fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode()


def _within_a_text(step: Any) -> Any:
    """A step of encoding without the blank that some tokenizers put before every text."""
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return step | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return step | {"add_prefix_space": False}
        case {"type": "Sequence"}:
            steps = next(name for name in step if name != "type")
            return step | {
                steps: [inner for s in step[steps] if (inner := _within_a_text(s)) is not None]
            }
    return step


def _flat(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flat(inner)
    else:
        yield decoder


def _byte_letters() -> dict[str, bytes]:
    """The letter that stands for each byte in a byte-level vocabulary: printable Latin-1 for itself, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (b for b in range(256) if b not in set(printable))
    return {chr(b): bytes([b]) for b in printable} | {
        chr(0x100 + i): bytes([b]) for i, b in enumerate(others)
    }

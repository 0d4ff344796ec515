"""Maps token ids to bytes and text to token ids.

The only module of the redaction that imports tokenizers, on the first step with token ids.
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
"""Decoder steps that `_TokenDecoder` implements or that do not change text."""


class TokenizerUnusable(ValueError):
    """The tokenizer cannot be loaded, or does not define the bytes of each token."""


class UnknownToken(ValueError):
    """A token id is not in the tokenizer, so it belongs to another model."""


class Vocabulary:
    """Vocabulary of a model.

    pieces: Bytes of each id; None for unused ids. special: Ids without text, e.g. end of turn.
    """

    def __init__(
        self, tokenizer: Any, pieces: Sequence[bytes | None], special: frozenset[int]
    ) -> None:
        self._tokenizer, self._pieces = tokenizer, pieces
        self.special = special

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Load a tokenizer.json file or its directory; takes a second. Raises TokenizerUnusable."""
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            config = orjson.loads(file.read_bytes())
            within = {
                name: _without_prefix_space(config.get(name))
                for name in ("normalizer", "pre_tokenizer")
            }
            tokenizer = Tokenizer.from_buffer(orjson.dumps(config | within))
        except MemoryError:
            raise
        except Exception as error:  # the library raises no specific type
            raise TokenizerUnusable(f"{file}: {type(error).__name__}: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # text that looks like a special token is text
        read = _TokenDecoder(config.get("decoder"), str(file))
        added = tokenizer.get_added_tokens_decoder()
        vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        pieces: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, number in vocabulary.items():
            pieces[number] = token.encode() if number in added else read(token)
        return cls(
            tokenizer, pieces, frozenset(number for number, token in added.items() if token.special)
        )

    def spell(self, packed: bytes) -> tuple[Sequence[bytes], bytes]:
        """Return the bytes of each packed id and their concatenation. Raises UnknownToken."""
        # Unsigned: a negative id is out of range too.
        ids = struct.unpack(f"<{len(packed) // 4}I", packed)
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
        """Encode a text inside a larger text; bytes that are not UTF-8 become U+FFFD."""
        ids: list[int] = self._tokenizer.encode(
            text.decode("utf-8", "replace"), add_special_tokens=False
        ).ids
        return ids


class _TokenDecoder:
    """Decodes single vocabulary entries to bytes, like the tokenizer's decoder."""

    def __init__(self, decoder: Any, where: str) -> None:
        steps = list(_flat(decoder))
        kinds = {step["type"] for step in steps}
        if not steps or kinds - _TRANSPARENT - {"ByteLevel"}:
            raise TokenizerUnusable(
                f"{where}: unsupported decoder {sorted(kinds) or 'none'}: it does not define the "
                "bytes of each token"
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


def _without_prefix_space(step: Any) -> Any:
    """Return an encoding step without the space that some tokenizers prepend."""
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
                steps: [
                    inner for s in step[steps] if (inner := _without_prefix_space(s)) is not None
                ]
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
    """Return the byte of each letter in a byte-level vocabulary.

    Printable Latin-1 characters represent themselves, other bytes start at U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (b for b in range(256) if b not in set(printable))
    return {chr(b): bytes([b]) for b in printable} | {
        chr(0x100 + i): bytes([b]) for i, b in enumerate(others)
    }

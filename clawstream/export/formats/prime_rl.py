"""prime-rl's `TrainingSample`s as msgpack: each file is one `list[TrainingSample]`.

A sample is a msgspec structure with `array_like=True`, so it is a list of its fields in order. The
order was read in prime-rl at commit 559b447 (2026-08-21),
`src/prime_rl/transports/rollouts/types.py`; a release with other fields needs another version of
this file. prime-rl reads samples in memory only, so a program decodes the file and passes the
samples to `prepare_batch`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clawstream.export.row import ExportRow


class SampleWriter:
    """Writes `samples-00000.bin` and so on.

    Args:
        directory: of the files.
        rows_per_file: samples of one file, which a reader decodes at once.
        temperature: of the tokens whose step does not state one.
    """

    def __init__(self, directory: Path, rows_per_file: int = 512, temperature: float = 1.0) -> None:
        self._directory, self._limit, self._temperature = directory, rows_per_file, temperature
        self._samples: list[list[Any]] = []
        self._files = 0

    def write(self, row: ExportRow) -> str | None:
        """Add one sample. prime-rl refuses a sample without advantages, so it is not written."""
        if row.origin.advantage is None:
            return "no reward"
        self._samples.append(sample(row, row.origin.advantage, self._temperature))
        if len(self._samples) >= self._limit:
            self._write_file()
        return None

    def close(self, provenance: str) -> None:
        """Write the last file."""
        if self._samples:
            self._write_file()

    def _write_file(self) -> None:
        path = self._directory / f"samples-{self._files:05}.bin"
        path.write_bytes(msgspec.msgpack.encode(self._samples))
        self._files, self._samples = self._files + 1, []


def sample(row: ExportRow, advantage: float, temperature: float) -> list[Any]:
    """Return the fields of a TrainingSample; lists have one value per token.

    Args:
        row: with tokens.
        advantage: of every token to train; 0 for others.
        temperature: of tokens without a known one.
    """
    tokens = row.tokens
    assert tokens is not None, "a row of a token format has tokens"
    # ref_logprobs, mm_kwargs, routed_experts, mm_token_type_ids, and three loss weights.
    absent = (None,) * 7
    return [
        tokens.ids.tolist(),
        tokens.mask.tolist(),
        np.where(tokens.mask, tokens.logprobs, 0).tolist(),
        np.where(np.isnan(tokens.temperatures), temperature, tokens.temperatures).tolist(),
        row.origin.run_id,
        *absent,
        np.where(tokens.mask, advantage, 0.0).tolist(),
    ]

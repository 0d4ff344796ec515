"""`verl.DataProto` files, for `DataProto.load_from_disk`.

`DataProto.save_to_disk` pickles an object whose state is (batch, non_tensor_batch, meta_info). With
the environment variable VERL_DATAPROTO_SERIALIZATION_METHOD=numpy the batch is (batch size, device,
{name: (dtype, shape, bytes)}), which needs no class of tensordict. This module writes that state,
so neither verl nor tensordict is needed here; the variable must be set where the file is loaded.
The layout was read in verl 0.7.0, `verl/protocol.py`.

Tensors, B rows, P and R the longest prompt and response of the file:
- `prompts` (B, P) int64, padded on the left: the tokens before the first sampled one.
- `responses` (B, R) int64, padded on the right: all tokens from the first sampled one on, with the
  environment's among them.
- `response_mask` (B, R) int64: 1 for tokens to train.
- `input_ids`, `attention_mask`, `position_ids` (B, P + R) int64.
- `rollout_log_probs` (B, R) float32; 0 where response_mask is 0.
- `token_level_scores` (B, R) float32: the reward at the last token of the response.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clawstream.export.row import ExportRow
from clawstream.trainer.data.sequences import Tokens

Arrays = dict[str, NDArray[Any]]
_PROTOCOL = 3
"""Pickle protocol: the newest without frames, so that a pickled state is a part of another one."""


class DataProtoWriter:
    """Writes `data-00000.pkl` and so on.

    Args:
        directory: of the files.
        rows_per_file: rows of one DataProto, which is in memory as a whole.
        pad_token_id: of the tokenizer; padding has attention mask 0.
    """

    def __init__(self, directory: Path, rows_per_file: int = 512, pad_token_id: int = 0) -> None:
        self._directory, self._limit, self._pad = directory, rows_per_file, pad_token_id
        self._rows: list[ExportRow] = []
        self._files = 0

    def write(self, row: ExportRow) -> str | None:
        """Add one sequence. A sequence without a reward has no score and is not written."""
        if row.origin.reward is None:
            return "no reward"
        self._rows.append(row)
        if len(self._rows) >= self._limit:
            self._write_file()
        return None

    def close(self, provenance: str) -> None:
        """Write the last file."""
        if self._rows:
            self._write_file()

    def _write_file(self) -> None:
        path = self._directory / f"data-{self._files:05}.pkl"
        path.write_bytes(pickled(self._rows, self._pad))
        self._files, self._rows = self._files + 1, []


def pickled(rows: Sequence[ExportRow], pad: int) -> bytes:
    """Return the pickle of a DataProto: its class by name, and its state.

    Args:
        rows: with tokens and a reward.
        pad: token id of padding.
    """
    tensors = tensors_of(rows, pad)
    others: dict[str, list[Any]] = {
        "uid": [f"{row.origin.run_id}/{row.origin.group_id}/{row.origin.round}" for row in rows],
        "trajectory_id": [row.origin.trajectory_id for row in rows],
        "step_id": [row.step_id for row in rows],
        "advantage": [row.origin.advantage for row in rows],
        "temperature": [_temperature(_tokens(row)) for row in rows],
    }
    state = (
        (
            (len(rows),),
            None,
            {name: (str(v.dtype), v.shape, v.tobytes()) for name, v in tensors.items()},
        ),
        {name: _objects(values) for name, values in others.items()},
        {"pad_token_id": pad},
    )
    return b"".join(
        (
            pickle.PROTO + bytes([_PROTOCOL]),
            pickle.GLOBAL + b"verl.protocol\nDataProto\n",
            pickle.EMPTY_TUPLE + pickle.NEWOBJ,
            pickle.dumps(state, _PROTOCOL)[2:-1],  # without its PROTO and STOP
            pickle.BUILD + pickle.STOP,
        )
    )


def tensors_of(rows: Sequence[ExportRow], pad: int) -> Arrays:
    """Return the tensors of the module's description by name."""
    sequences = [_tokens(row) for row in rows]
    starts = [int(np.argmax(tokens.mask)) for tokens in sequences]
    prompt = max(starts)
    response = max(len(t.ids) - start for t, start in zip(sequences, starts, strict=True))
    shape = (len(rows), prompt + response)
    ids = np.full(shape, pad, np.int64)
    attention, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    logprobs, scores = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for i, (row, tokens, start) in enumerate(zip(rows, sequences, starts, strict=True)):
        at = slice(prompt - start, prompt - start + len(tokens.ids))
        ids[i, at], attention[i, at], mask[i, at] = tokens.ids, 1, tokens.mask
        logprobs[i, at] = np.where(tokens.mask, tokens.logprobs, 0)
        scores[i, at.stop - 1] = row.origin.reward
    return {
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "response_mask": mask[:, prompt:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(1) - 1, 0),
        "rollout_log_probs": logprobs[:, prompt:],
        "token_level_scores": scores[:, prompt:],
    }


def _tokens(row: ExportRow) -> Tokens:
    assert row.tokens is not None, "a row of a token format has tokens"
    return row.tokens


def _temperature(tokens: Tokens) -> float | None:
    """Return the temperature of all trained tokens; None if it is unknown or not one."""
    found = set(tokens.trained().temperatures.tolist())
    only = found.pop() if len(found) == 1 else None
    return None if only is None or np.isnan(only) else float(only)


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """Return values as verl keeps what is no tensor: a one-dimensional array of objects."""
    array = np.empty(len(values), object)
    array[:] = values
    return array

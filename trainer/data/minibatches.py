"""How the rows of a batch become optimiser steps and forward passes. Pure, and a function of the batch alone.

The shuffle depends on (seed, batch_seq, epoch) only, so a checkpoint's position is the whole state of the sampler.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from trainer.data.sequences import Row


def minibatches(
    rows: Sequence[Row], count: int, epochs: int, seed: int, batch_seq: int
) -> Iterator[list[Row]]:
    """Rows of each optimiser step: every epoch shuffles all rows and splits them into `count` parts of nearly equal size."""
    for epoch in range(epochs):
        order = list(rows)
        random.Random(f"{seed}/{batch_seq}/{epoch}").shuffle(order)
        parts = min(count, len(order))
        for i in range(parts):
            yield order[len(order) * i // parts : len(order) * (i + 1) // parts]


def micro_batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows of each forward pass, by length, such that rows times the longest stays within max_tokens (one row may exceed it)."""
    out: list[list[Row]] = []
    for row in sorted(rows, key=lambda r: len(r.token_ids)):
        if out and (len(out[-1]) + 1) * len(row.token_ids) <= max_tokens:
            out[-1].append(row)
        else:
            out.append([row])
    return out

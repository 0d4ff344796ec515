"""Split the sequences of a batch into optimiser steps and forward passes.

The functions are pure and depend on the batch alone. The shuffle depends on (seed, batch_seq,
epoch) only, so a checkpoint's position is the whole state of the sampler.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from trainer.data.sequences import TrainingSequence


def minibatches(
    sequences: Sequence[TrainingSequence], count: int, epochs: int, seed: int, batch_seq: int
) -> Iterator[list[TrainingSequence]]:
    """Yield the sequences of each optimiser step.

    Every epoch shuffles all sequences and splits them into `count` parts of nearly equal size.
    """
    for epoch in range(epochs):
        order = list(sequences)
        random.Random(f"{seed}/{batch_seq}/{epoch}").shuffle(order)
        parts = min(count, len(order))
        for i in range(parts):
            yield order[len(order) * i // parts : len(order) * (i + 1) // parts]


def micro_batches(
    sequences: Sequence[TrainingSequence], max_tokens: int
) -> list[list[TrainingSequence]]:
    """Return the sequences of each forward pass, sorted by length.

    In each pass, the number of sequences times the longest length is at most max_tokens. A single
    longer sequence has a pass of its own.
    """
    out: list[list[TrainingSequence]] = []
    for sequence in sorted(sequences, key=lambda s: len(s.tokens.ids)):
        if out and (len(out[-1]) + 1) * len(sequence.tokens.ids) <= max_tokens:
            out[-1].append(sequence)
        else:
            out.append([sequence])
    return out


def shares(sequences: Sequence[TrainingSequence], count: int) -> list[list[TrainingSequence]]:
    """Return `count` shares of nearly equal numbers of tokens, for as many processes.

    The longest sequence goes to the smallest share, and so on.
    """
    parts: list[list[TrainingSequence]] = [[] for _ in range(count)]
    sizes = [0] * count
    for sequence in sorted(sequences, key=lambda s: -len(s.tokens.ids)):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(sequence)
        sizes[smallest] += len(sequence.tokens.ids)
    return parts

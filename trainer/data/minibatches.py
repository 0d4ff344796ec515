"""Split the sequences of a batch into optimiser steps and forward passes.

The functions are pure and depend on the batch alone. The shuffle depends on (seed, batch_seq,
epoch) only, so a checkpoint's position is the whole state of the sampler.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from clawstream.trainer.data.packing import cut, packed_length
from clawstream.trainer.data.sequences import TrainingSequence


def minibatches(
    sequences: Sequence[TrainingSequence], count: int, epochs: int, seed: int, batch_seq: int
) -> Iterator[list[TrainingSequence]]:
    """Yield the sequences of each optimiser step.

    Every epoch shuffles the groups and splits them into `count` parts of nearly equal size: the
    sequences of a group share a prompt, which is computed once for each part. A batch with fewer
    groups than `count` is split by sequences.
    """
    units = _units(sequences, count)
    for epoch in range(epochs):
        order = units.copy()
        random.Random(f"{seed}/{batch_seq}/{epoch}").shuffle(order)
        parts = min(count, len(order))
        for i in range(parts):
            part = order[len(order) * i // parts : len(order) * (i + 1) // parts]
            yield [sequence for unit in part for sequence in unit]


def micro_batches(
    sequences: Sequence[TrainingSequence], max_tokens: int, *, packed: bool = False
) -> list[list[TrainingSequence]]:
    """Return the sequences of each forward pass, each one with at most max_tokens.

    Packed, these are the tokens of the packed row. Otherwise it is the number of sequences times
    the longest length, with the sequences sorted by length. A single longer sequence has a pass of
    its own, and so has each sequence with images: its pixels are in memory during that pass only.
    """
    if packed:
        rows = cut([sequence.tokens.ids for sequence in sequences], max_tokens)
        return [[sequences[i] for i in sorted(row)] for row in rows]
    out: list[list[TrainingSequence]] = []
    for sequence in sorted(sequences, key=lambda s: len(s.tokens.ids)):
        fits = out and (len(out[-1]) + 1) * len(sequence.tokens.ids) <= max_tokens
        if fits and not sequence.images and not out[-1][0].images:
            out[-1].append(sequence)
        else:
            out.append([sequence])
    return out


def shares(
    sequences: Sequence[TrainingSequence], count: int, *, packed: bool
) -> list[list[TrainingSequence]]:
    """Return `count` shares of nearly equal numbers of computed tokens, for as many processes.

    The largest unit goes to the smallest share, and so on. A unit is a sequence; packed, it is a
    group, unless there are fewer groups than shares.
    """
    units = _units(sequences, count) if packed else [[sequence] for sequence in sequences]
    sized = [(packed_length([s.tokens.ids for s in unit]), unit) for unit in units]
    parts: list[list[TrainingSequence]] = [[] for _ in range(count)]
    sizes = [0] * count
    for size, unit in sorted(sized, key=lambda pair: -pair[0]):
        smallest = sizes.index(min(sizes))
        parts[smallest] += unit
        sizes[smallest] += size
    return parts


def _units(sequences: Sequence[TrainingSequence], count: int) -> list[list[TrainingSequence]]:
    """Return the groups, or the single sequences if there are fewer groups than `count`."""
    groups: dict[tuple[str | None, int], list[TrainingSequence]] = {}
    for sequence in sequences:
        groups.setdefault((sequence.environment, sequence.group), []).append(sequence)
    return list(groups.values()) if len(groups) >= count else [[s] for s in sequences]

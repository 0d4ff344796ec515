"""Peak memory of log-probabilities at a large vocabulary: all logits, and chunks of them.

A peak is that of a whole process, so each way is computed in a fork of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor

from clawstream.trainer.model.chunked_scores import chunked_scores


class Sizes(NamedTuple):
    """Tokens of a pass, those of them that are trained, and the shape of the head."""

    tokens: int
    trained: int
    vocabulary: int
    width: int


FULL = Sizes(tokens=2048, trained=687, vocabulary=151_936, width=256)
CHECK = Sizes(tokens=256, trained=86, vocabulary=32_768, width=32)

Compute = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def peaks(sizes: Sizes) -> tuple[int, int]:
    """Return the bytes by which a process grows: with all logits, and with chunks of them."""
    return _peak(_all_logits, sizes), _peak(_chunks, sizes)


def _peak(compute: Compute, sizes: Sizes) -> int:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(compute, sizes, theirs))
    process.start()
    theirs.close()
    grown: int = ours.recv()
    process.join()
    return grown


def _measure(compute: Compute, sizes: Sizes, reply: Connection) -> None:
    """Compute forward and backward passes, and send by how much the process has grown, bytes."""
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.width, requires_grad=True)
    weight = torch.randn(sizes.vocabulary, sizes.width).mul_(0.02).requires_grad_()
    trained = torch.arange(sizes.trained) * (sizes.tokens // sizes.trained)
    targets = torch.arange(sizes.trained)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compute(hidden, weight, trained, targets).sum().backward()  # type: ignore[no-untyped-call]
    reply.send(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def _all_logits(hidden: Tensor, weight: Tensor, trained: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities from the logits of every position of a pass."""
    logits = (hidden @ weight.T)[trained].float()
    return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _chunks(hidden: Tensor, weight: Tensor, trained: Tensor, targets: Tensor) -> Tensor:
    ones = torch.ones(len(targets))
    return chunked_scores(
        hidden[trained], weight, targets, ones, torch.float32, with_entropy=False
    )[0]

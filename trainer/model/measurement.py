"""Measure tokens while they are trained, without another pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.importance import bounded, out_of_bounds
from clawstream.trainer.algorithms.kl import kl
from clawstream.trainer.algorithms.registry import LoadedAlgorithm
from clawstream.trainer.data.micro_batch import MicroBatch
from clawstream.trainer.data.sequences import TrainingSequence
from clawstream.trainer.metrics.definitions import OWN
from clawstream.trainer.metrics.statistics import TokenStats
from clawstream.trainer.parallel.processes import Processes


class Measurement:
    """Sums and maxima over the passes of one optimiser step.

    They stay on the device until `stats`: each reading waits for the device.
    """

    def __init__(self, algorithm: LoadedAlgorithm, parent_version: str | None) -> None:
        """Begin.

        Args:
            algorithm: that is trained.
            parent_version: the version with exactly the weights of the passes; None: unknown, then
                engine and trainer are not compared.
        """
        self._algorithm, self._parent_version = algorithm, parent_version
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, view: LossBatch, batch: MicroBatch, own: Mapping[str, Tensor]) -> None:
        """Add one pass.

        Args:
            view: of `batch`, at the weights of the step.
            batch: the pass.
            own: metrics of a user's own loss, shape (tokens,) each.
        """
        on = view.mask
        exact = view.logprobs.detach() - view.sampled_logprobs
        log_ratio = bounded(exact)
        ratio = log_ratio.exp()
        self._sum("tokens", on)
        self._sum("now_at_zero", ~on)
        self._sum("logprobs", view.logprobs.masked_fill(~on, 0.0))
        self._sum("ratios", ratio.masked_fill(~on, 0.0))
        self._sum("squared_ratios", ratio.square().masked_fill(~on, 0.0))
        self._maximum("largest_ratio", ratio.masked_fill(~on, 0.0))
        self._sum("kl_sampled", (torch.expm1(log_ratio) - log_ratio).masked_fill(~on, 0.0))
        if view.ref_logprobs is not None:
            divergence = kl(view.logprobs, view.ref_logprobs, "k3")
            self._sum("kl_reference", divergence.masked_fill(~on, 0.0))
        if view.entropy is not None:
            self._sum("entropy", view.entropy.masked_fill(~on, 0.0))
        for name, values in own.items():
            self._sum(f"{OWN}{name}", values.masked_fill(~on, 0.0))
        algorithm = self._algorithm
        if algorithm.clipped is not None:
            clipped = algorithm.clipped(view, algorithm.settings) & on
            for name, signed in (
                ("positive", view.advantages > 0),
                ("negative", view.advantages < 0),
            ):
                self._sum(name, signed & on)
                self._sum(f"clipped_{name}", clipped & signed)
            self._sum("clipped", clipped)
        if algorithm.corrected is not None:
            target = getattr(view, algorithm.corrected)
            self._sum("corrected", out_of_bounds(target, view, algorithm.settings) & on)
        if self._parent_version is not None:
            self._compare(exact.abs().masked_fill(~on, 0.0), batch)

    def combine(self, processes: Processes) -> None:
        """Add the passes of the other processes; every process must call it."""
        if processes.size == 1:
            return
        own = [{name: v.cpu() for name, v in part.items()} for part in (self._sums, self._maxima)]
        self._sums, self._maxima = {}, {}
        for sums, maxima in processes.gather(own):
            for name, value in sums.items():
                self._sum(name, value)
            for name, value in maxima.items():
                self._maximum(name, value)

    def _compare(self, distance: Tensor, batch: MicroBatch) -> None:
        """Add |log p_trainer - log p_engine|, shape (tokens,)."""
        self._maximum("logp_diff", distance)
        same = torch.from_numpy(batch.versions == self._parent_version).to(distance.device)
        self._sum("same_tokens", same)
        self._sum("same_diffs", distance * same)
        self._maximum("same_largest", distance * same)

    def _sum(self, name: str, values: Tensor) -> None:
        total = values.sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def _maximum(self, name: str, values: Tensor) -> None:
        largest = values.max()
        before = self._maxima.get(name, largest)
        self._maxima[name] = torch.maximum(before, largest)

    @property
    def now_at_zero(self) -> int:
        """Tokens to which the policy gives probability zero."""
        return int(self._sums.get("now_at_zero", 0))

    def stats(self) -> TokenStats | None:
        """Return sums and maxima; None without a pass."""
        if not self._sums:
            return None
        values = torch.stack([*self._sums.values(), *(m.double() for m in self._maxima.values())])
        found = dict(zip([*self._sums, *self._maxima], values.tolist(), strict=True))
        same = int(found.pop("same_tokens", 0))
        difference, largest = found.pop("same_diffs", 0.0), found.pop("same_largest", 0.0)
        return TokenStats(
            tokens=int(found["tokens"]),
            logprobs=found["logprobs"],
            ratios=found["ratios"],
            squared_ratios=found["squared_ratios"],
            largest_ratio=found["largest_ratio"],
            kl_sampled=found["kl_sampled"],
            kl_reference=found.get("kl_reference"),
            entropy=found.get("entropy"),
            clipped=int(found["clipped"]) if "clipped" in found else None,
            clipped_positive=_pair(found, "positive"),
            clipped_negative=_pair(found, "negative"),
            corrected=int(found["corrected"]) if "corrected" in found else None,
            logp_diff=found.get("logp_diff"),
            same_version=(same, difference, largest) if same else None,
            own={name: value for name, value in found.items() if name.startswith(OWN)},
        )


class FirstPass(NamedTuple):
    """What the first training pass of a sequence gave.

    Attributes:
        logprobs: float32, (trained tokens,); minus infinity: the policy gave probability zero.
        updates: optimiser steps since the current version.
    """

    logprobs: NDArray[np.float32]
    updates: int


def _pair(found: Mapping[str, float], sign: str) -> tuple[int, int] | None:
    if sign not in found:
        return None
    return int(found[f"clipped_{sign}"]), int(found[sign])


class FirstPasses:
    """Log-probabilities of sequences in the first training pass of each.

    A pass of a skipped optimiser step does not count: nothing was learned from it. The values stay
    on the device until `gathered`: each reading waits for the device.
    """

    def __init__(self, sequences: Sequence[TrainingSequence], updates: int) -> None:
        """Begin.

        Args:
            sequences: whose values are wanted.
            updates: optimiser steps since the current version.
        """
        self._sequences, self._updates = sequences, updates
        # A changed copy of a sequence has the same tokens.
        self._wanted = {id(sequence.tokens): i for i, sequence in enumerate(sequences)}
        self._taken = set[int]()
        self._parts: list[tuple[list[int | None], list[int], Tensor, int]] = []
        self._of_earlier_steps = 0

    def add(self, part: Sequence[TrainingSequence], view: LossBatch) -> None:
        """Add one pass of this process. view: of `part`, at the weights of the step."""
        places = [self._wanted.get(id(sequence.tokens)) for sequence in part]
        if any(place is not None for place in places):
            lengths = [sequence.trained_tokens for sequence in part]
            exact = view.logprobs.detach().masked_fill(~view.mask, -torch.inf)
            self._parts.append((places, lengths, exact, self._updates))

    def end_step(self, sequences: Sequence[TrainingSequence], *, taken: bool) -> None:
        """End an optimiser step: after a taken one, a later pass of its sequences is not the first.

        Args:
            sequences: of the step, in all processes.
            taken: the weights have changed.
        """
        if not taken:
            del self._parts[self._of_earlier_steps :]
            return
        for sequence in sequences:
            self._wanted.pop(id(sequence.tokens), None)
            self._taken.add(id(sequence.tokens))
        self._of_earlier_steps = len(self._parts)
        self._updates += 1

    def trained(self, sequence: TrainingSequence) -> bool:
        """Return whether an optimiser step on the sequence was taken, in whichever process."""
        return id(sequence.tokens) in self._taken

    def gathered(self, processes: Processes) -> list[tuple[TrainingSequence, FirstPass | None]]:
        """Return the sequences of taken steps with their values, on every process; None: no pass
        was needed.
        """
        own: dict[int, FirstPass] = {}
        for places, lengths, values, updates in self._parts:
            shares = np.split(values.float().cpu().numpy(), np.cumsum(lengths)[:-1])
            for place, share in zip(places, shares, strict=True):
                if place is not None:
                    own[place] = FirstPass(share, updates)
        found = {at: values for part in processes.gather(own) for at, values in part.items()}
        return [
            (sequence, found.get(at))
            for at, sequence in enumerate(self._sequences)
            if self.trained(sequence)
        ]

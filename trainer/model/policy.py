"""The trained model: log-probabilities, optimiser, and one update over the sequences of a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schemas.ids import parse_version
from schemas.settings import TrainerSettings
from trainer.data.minibatches import micro_batches, minibatches
from trainer.data.sequences import TrainingSequence
from trainer.metrics import StepStats, UpdateStats
from trainer.model.files import (
    TensorDtypes,
    auxiliary_files,
    load_masters,
    save_masters,
    save_rounded,
)

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
PADDING = 0  # any id: it is on the right, so no token attends to it, and it is never trained


class Policy:
    """Model and AdamW on one device.

    The whole state is `save` (the weights) plus `training_state` (optimiser, random states).

    Weights, optimiser state and gradients are float32 for any `trainer.dtype`. At a learning rate
    of 1e-6 an update is smaller than half the distance between two bfloat16 numbers, so rounding
    would remove it.
    """

    def __init__(self, directory: Path, settings: TrainerSettings) -> None:
        """Load the weights of a Hugging Face directory, with a new optimiser.

        Raises:
            SettingsError: the weights cannot be read.
        """
        self.settings = settings
        cuda = settings.device == "cuda" or (
            settings.device == "auto" and torch.cuda.is_available()
        )
        self.device = torch.device("cuda" if cuda else "cpu")
        model, self._own_dtypes = load_masters(directory)
        self.model = model.to(self.device)
        self._auxiliary = auxiliary_files(directory)
        # Gradients flow, but dropout is off: the trained model must equal the sampled model.
        self.model.eval()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        torch.manual_seed(settings.seed)

    @property
    def vocabulary(self) -> int:
        """Number of token ids with an embedding: 0 to vocabulary - 1."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def save(self, directory: Path, dtypes: TensorDtypes | None = None) -> None:
        """Write a Hugging Face directory: safetensors, configuration and tokenizer files.

        The tokenizer files are those of the directory that the model was loaded from.

        Args:
            directory: the target; it is created if necessary.
            dtypes: the dtypes to round to; None keeps the float32 master weights for a checkpoint.
        """
        if dtypes is None:
            save_masters(self.model, directory)
        else:
            save_rounded(self.model, directory, dtypes)
        for name, content in self._auxiliary.items():
            if not (directory / name).exists():
                (directory / name).write_bytes(content)

    def served_dtypes(self, engine_dtype: str) -> TensorDtypes:
        """Return the dtypes of published versions.

        Args:
            engine_dtype: `rollout.dtype`; `auto` means the dtype of the model itself.
        """
        own = self._own_dtypes
        return (
            own
            if engine_dtype == "auto"
            else TensorDtypes(getattr(torch, engine_dtype), own.others)
        )

    def training_state(self) -> dict[str, Any]:
        """Return the state that a resume needs besides the weights, for `torch.save`."""
        cuda = torch.cuda.get_rng_state_all() if self.device.type == "cuda" else []
        return {
            "optimizer": self.optimizer.state_dict(),
            "rng_cpu": torch.get_rng_state(),
            "rng_cuda": cuda,
            "dtype": self._own_dtypes.main,
            "other_dtypes": dict(self._own_dtypes.others),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of `training_state` exactly."""
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng_cpu"])
        if state["rng_cuda"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["rng_cuda"])
        # The checkpoint's files are float32.
        self._own_dtypes = TensorDtypes(state["dtype"], state["other_dtypes"])

    def logprobs(self, sequences: Sequence[TrainingSequence]) -> Tensor:
        """Return the log-probability of every trained token, in sequence order.

        Each value belongs to the distribution at the temperature of its step, as the engine's does:
        log softmax(logits / temperature).

        Returns:
            Shape (tokens,), float32, with gradient.
        """
        longest = max(len(sequence.token_ids) for sequence in sequences)
        ids = torch.full((len(sequences), longest), PADDING)
        trained = torch.zeros((len(sequences), longest), dtype=torch.bool)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
            trained[i, : len(sequence.token_ids)] = torch.tensor(sequence.mask)
        ids, trained = ids.to(self.device), trained[:, 1:].to(self.device)
        # No attention mask: padding is on the right, where a causal model never looks, and flash
        # kernels accept no mask.
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"
        ):
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        scores: Tensor = logits[trained].float() / self._temperatures(sequences).unsqueeze(-1)
        chosen = scores.gather(-1, ids[:, 1:][trained].unsqueeze(-1)).squeeze(-1)
        return chosen - scores.logsumexp(-1)

    def _temperatures(self, sequences: Sequence[TrainingSequence]) -> Tensor:
        """Return the temperature of every trained token, in sequence order: shape (tokens,).

        The settings supply the temperature of a step that has none.
        """
        known = [temperatures_of(sequence, self.settings.temperature) for sequence in sequences]
        return torch.tensor(
            [t for of_sequence in known for t in of_sequence],
            dtype=torch.float32,
            device=self.device,
        )

    def update(
        self,
        sequences: Sequence[TrainingSequence],
        batch_seq: int,
        loss: Loss,
        lr: float,
        parent_version: str | None,
    ) -> UpdateStats:
        """Train one batch with one optimiser step for each minibatch.

        A step with a non-finite loss or gradient is skipped: weights and optimiser stay unchanged.

        Args:
            sequences: of the batch.
            batch_seq: number of the batch; the shuffle depends on it.
            loss: the policy loss of the algorithm.
            lr: learning rate.
            parent_version: the version with exactly these weights; None after an update since it.
        """
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        s = self.settings
        steps: list[StepStats] = []
        for part in minibatches(sequences, s.minibatches, s.epochs, s.seed, batch_seq):
            unchanged = all(step.skipped is not None for step in steps)
            steps.append(self._step(part, loss, parent_version if unchanged else None))
        return UpdateStats(steps=tuple(steps), seconds=time.perf_counter() - began)

    def _step(
        self, sequences: Sequence[TrainingSequence], loss: Loss, parent_version: str | None
    ) -> StepStats:
        """Take one optimiser step; the loss is the mean over the trained tokens of `sequences`.

        Sequences with advantage 0 count in that mean but add nothing to loss or gradient, so they
        need no forward or backward pass.
        """
        s = self.settings
        tokens = sum(sequence.trained_tokens for sequence in sequences)
        learned = [sequence for sequence in sequences if sequence.advantage != 0.0]
        total, truncated, now_at_zero, differences = 0.0, 0, 0, Differences(parent_version)
        self._clear_gradients(zeros=not learned)
        for part in micro_batches(learned, s.micro_batch_tokens):
            sampled, advantages = self._recorded(part)
            logprobs = self.logprobs(part)
            # Minus infinity times a ratio of zero is NaN. Such a token has no usable gradient.
            at_zero = torch.isneginf(logprobs.detach())
            possible = logprobs.masked_fill(at_zero, 0.0)
            losses = loss(possible, sampled, advantages, s.is_truncation).masked_fill(at_zero, 0.0)
            mean = losses.sum() / tokens
            mean.backward()  # type: ignore[no-untyped-call]
            total += mean.item()
            difference = (logprobs.detach() - sampled).masked_fill(at_zero, 0.0)
            truncated += int((difference > math.log(s.is_truncation)).sum())
            now_at_zero += int(at_zero.sum())
            differences.add(part, difference)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.max_grad_norm).item()
        finite = math.isfinite(total) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
        return StepStats(
            tokens=tokens,
            passed_tokens=sum(sequence.trained_tokens for sequence in learned),
            loss=total if finite else None,
            grad_norm=norm if finite else None,
            skipped=None if finite else f"loss {total}, gradient norm {norm}",
            truncated_tokens=truncated,
            now_at_zero=now_at_zero,
            logp_diff=differences.largest if finite else None,
            logp_diff_same_version=differences.largest_same_version if finite else None,
        )

    def _clear_gradients(self, *, zeros: bool) -> None:
        """Clear the gradients.

        zeros: set them to zero instead of None, so that AdamW takes a step without a new gradient.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if zeros:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def _recorded(self, sequences: Sequence[TrainingSequence]) -> tuple[Tensor, Tensor]:
        """Return sampled log-probabilities and advantages of the trained tokens, in sequence order.

        Returns:
            Two tensors of shape (tokens,).
        """
        trained = [
            (sequence.logprobs[i], sequence.advantage)
            for sequence in sequences
            for i in trained_positions(sequence)
        ]
        sampled, advantages = torch.tensor(trained, dtype=torch.float32, device=self.device).unbind(
            -1
        )
        return sampled, advantages


class Differences:
    """Track the largest |log-probability now - sampled| while the weights are those of `version`.

    All values stay None when `version` is None.
    """

    def __init__(self, version: str | None) -> None:
        self._version = version
        self.largest: float | None = None
        self.largest_same_version: float | None = None

    def add(self, sequences: Sequence[TrainingSequence], difference: Tensor) -> None:
        """Add differences of the trained tokens, in sequence order, shape (tokens,)."""
        if self._version is None:
            return
        size = difference.abs()
        self.largest = max(self.largest or 0.0, size.max().item())
        same = torch.tensor(
            [same for sequence in sequences for same in _sampled_by(sequence, self._version)],
            device=size.device,
        )
        if bool(same.any()):
            self.largest_same_version = max(
                self.largest_same_version or 0.0, size[same].max().item()
            )


def trained_positions(sequence: TrainingSequence) -> list[int]:
    """Return the indexes of the sequence's trained tokens."""
    return [i for i, trained in enumerate(sequence.mask) if trained]


def temperatures_of(sequence: TrainingSequence, assumed: float) -> list[float]:
    """Return the temperature at which each trained token is scored.

    assumed: temperature for steps that record none.
    """
    of_token = [assumed] * len(sequence.token_ids)
    for temperature, start, end in sequence.temperatures:
        of_token[start:end] = [temperature] * (end - start)
    return [of_token[i] for i in trained_positions(sequence)]


def _sampled_by(sequence: TrainingSequence, version: str) -> list[bool]:
    """Return for each trained token whether `version` sampled it."""
    spans = [(span.start, span.end) for span in sequence.versions if span.version == version]
    return [any(start <= i < end for start, end in spans) for i in trained_positions(sequence)]


def staleness(
    sequences: Sequence[TrainingSequence], run_id: str, sync_index: int
) -> tuple[int, int]:
    """Return the sum of the staleness over trained tokens, and the number of these tokens.

    Counts tokens with a known version of this run; their staleness is sync_index minus the
    version's sync index.
    """
    total = known = 0
    for sequence in sequences:
        for span in sequence.versions:
            version = parse_version(span.version)
            if version is not None and version.run_id == run_id:
                trained = sum(sequence.mask[span.start : span.end])
                total += (sync_index - version.sync_index) * trained
                known += trained
    return total, known

"""The model that learns: its log-probabilities, its optimiser, and one update over the sequences of
a batch.
"""

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
PADDING = 0  # any id: it is on the right, so nothing sees it, and it is never trained


class Policy:
    """Model and AdamW on one device.

    Its whole state is `save` (the weights) plus `training_state` (optimiser, RNGs).

    The weights that learn, the optimiser's state and the gradients are float32 whatever
    `trainer.dtype` is: at a learning rate of 1e-6 an update is smaller than half the distance
    between two bfloat16 numbers, and would be rounded away.
    """

    def __init__(self, directory: Path, settings: TrainerSettings) -> None:
        """Load the weights of a Hugging Face directory, with a fresh optimiser.

        Raises SettingsError when they can't be read.
        """
        self.settings = settings
        cuda = settings.device == "cuda" or (
            settings.device == "auto" and torch.cuda.is_available()
        )
        self.device = torch.device("cuda" if cuda else "cpu")
        model, self._own_dtypes = load_masters(directory)
        self.model = model.to(self.device)
        self._auxiliary = auxiliary_files(directory)
        # gradients flow, dropout does not: what is trained must be what was sampled from
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
        """Token ids that the model has an embedding for: 0 up to this."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def save(self, directory: Path, dtypes: TensorDtypes | None = None) -> None:
        """Write a Hugging Face directory: weights as safetensors, configuration, the tokenizer
        files it was loaded with.

        Args:
            directory: where to; it need not be there.
            dtypes: the dtypes to round to; None: the float32 masters, which a checkpoint needs.
        """
        if dtypes is None:
            save_masters(self.model, directory)
        else:
            save_rounded(self.model, directory, dtypes)
        for name, content in self._auxiliary.items():
            if not (directory / name).exists():
                (directory / name).write_bytes(content)

    def served_dtypes(self, engine_dtype: str) -> TensorDtypes:
        """Return the dtypes in which versions are published.

        Args: engine_dtype: `rollout.dtype`, which names the dtype; `auto` means the dtype that the
            model itself has.
        """
        own = self._own_dtypes
        return (
            own
            if engine_dtype == "auto"
            else TensorDtypes(getattr(torch, engine_dtype), own.others)
        )

    def training_state(self) -> dict[str, Any]:
        """What a resume needs beside the weights, for `torch.save`."""
        cuda = torch.cuda.get_rng_state_all() if self.device.type == "cuda" else []
        return {
            "optimizer": self.optimizer.state_dict(),
            "rng_cpu": torch.get_rng_state(),
            "rng_cuda": cuda,
            "dtype": self._own_dtypes.main,
            "other_dtypes": dict(self._own_dtypes.others),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on exactly where `training_state` was taken."""
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng_cpu"])
        if state["rng_cuda"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["rng_cuda"])
        self._own_dtypes = TensorDtypes(
            state["dtype"], state["other_dtypes"]
        )  # the checkpoint's files are float32

    def logprobs(self, sequences: Sequence[TrainingSequence]) -> Tensor:
        """Log-probability of every trained token of the sequences, sequence after sequence: shape
        (tokens,), float32, with gradient.

        Each of the distribution at the temperature of its step, as the engine's log-probability is:
        log softmax(logits / temperature).
        """
        longest = max(len(sequence.token_ids) for sequence in sequences)
        ids = torch.full((len(sequences), longest), PADDING)
        trained = torch.zeros((len(sequences), longest), dtype=torch.bool)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
            trained[i, : len(sequence.token_ids)] = torch.tensor(sequence.mask)
        ids, trained = ids.to(self.device), trained[:, 1:].to(self.device)
        # No attention mask: padding is on the right, where a causal model never looks, and flash
        # kernels take no mask.
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"
        ):
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        scores: Tensor = logits[trained].float() / self._temperatures(sequences).unsqueeze(-1)
        chosen = scores.gather(-1, ids[:, 1:][trained].unsqueeze(-1)).squeeze(-1)
        return chosen - scores.logsumexp(-1)

    def _temperatures(self, sequences: Sequence[TrainingSequence]) -> Tensor:
        """Of every trained token, sequence after sequence: shape (tokens,).

        What a step does not say is taken from the settings.
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
        """Train one batch: one optimiser step for each minibatch.

        A step whose loss or gradient is not finite is not taken: weights and optimiser stay as they
        were before it.

        Args: sequences: of the batch. batch_seq: the number of the batch; the shuffle depends on
            it. loss: the policy loss of its algorithm. lr: learning rate. parent_version: the
            version whose weights these still are; None once they were updated since it.
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

        Rows without advantage count in that mean, but add nothing to loss or gradient: they spare
        the passes.
        """
        s = self.settings
        tokens = sum(sequence.trained_tokens for sequence in sequences)
        learned = [sequence for sequence in sequences if sequence.advantage != 0.0]
        total, truncated, now_at_zero, differences = 0.0, 0, 0, Differences(parent_version)
        self._clear_gradients(zeros=not learned)
        for part in micro_batches(learned, s.micro_batch_tokens):
            sampled, advantages = self._recorded(part)
            logprobs = self.logprobs(part)
            # Minus infinity times a ratio of zero is not a number. Such a token has no gradient
            # that could be followed.
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
        """Forget the gradients.

        zeros: with them as numbers, so that AdamW takes a step that only goes on as before.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if zeros:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def _recorded(self, sequences: Sequence[TrainingSequence]) -> tuple[Tensor, Tensor]:
        """Sampled log-probabilities and advantages of the trained tokens, sequence after sequence:
        two tensors of shape (tokens,).
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
    """The largest |log-probability now - sampled| while the weights are those of `version`; all
    absent for None.
    """

    def __init__(self, version: str | None) -> None:
        self._version = version
        self.largest: float | None = None
        self.largest_same_version: float | None = None

    def add(self, sequences: Sequence[TrainingSequence], difference: Tensor) -> None:
        """difference: of the trained tokens, sequence after sequence, shape (tokens,)."""
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
    """Indexes of the sequence's trained tokens."""
    return [i for i, trained in enumerate(sequence.mask) if trained]


def temperatures_of(sequence: TrainingSequence, assumed: float) -> list[float]:
    """For each trained token: the temperature at which it is scored.

    assumed: where its step does not say.
    """
    of_token = [assumed] * len(sequence.token_ids)
    for temperature, start, end in sequence.temperatures:
        of_token[start:end] = [temperature] * (end - start)
    return [of_token[i] for i in trained_positions(sequence)]


def _sampled_by(sequence: TrainingSequence, version: str) -> list[bool]:
    """For each trained token: whether `version` sampled it."""
    spans = [(span.start, span.end) for span in sequence.versions if span.version == version]
    return [any(start <= i < end for start, end in spans) for i in trained_positions(sequence)]


def staleness(
    sequences: Sequence[TrainingSequence], run_id: str, sync_index: int
) -> tuple[int, int]:
    """Sum over the trained tokens of known version of this run of (sync_index - the version's), and
    their number.
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

"""The critic: a model of its own that estimates the return before each sampled token."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from transformers import PreTrainedModel

from clawstream.trainer.algorithms.values import explained_variance, value_loss
from clawstream.trainer.data.micro_batch import MicroBatch, collate
from clawstream.trainer.data.minibatches import minibatches
from clawstream.trainer.data.sequences import TrainingSequence
from clawstream.trainer.metrics.statistics import CriticStats
from clawstream.trainer.model.files import (
    auxiliary_files,
    empty_masters,
    load_masters,
    save_configuration,
)
from clawstream.trainer.model.frozen import check_vocabulary
from clawstream.trainer.model.scores import hidden_states, logprobs_of
from clawstream.trainer.model.state import ModelState, OptimizerState
from clawstream.trainer.parallel.processes import ONE, Processes
from clawstream.trainer.parallel.sharding import shard, whole
from clawstream.trainer.vision.inputs import ImageInputs

if TYPE_CHECKING:
    from clawstream.schemas.settings import TrainerSettings

PATH_SETTING = "trainer.critic.path"


class ValueModel(torch.nn.Module):
    """A transformer with a scalar head, which starts at zero.

    Attributes:
        first_sync_index: of the version that the critic's training began with.
    """

    first_sync_index: Tensor

    def __init__(
        self,
        backbone: PreTrainedModel,
        settings: TrainerSettings,
        sync_index: int,
        images: ImageInputs | None,
    ) -> None:
        super().__init__()
        self.backbone, self._settings, self._images = backbone, settings, images
        # Not `nn.Linear`: it draws random numbers, and the policy's must not depend on a critic.
        self.weight = torch.nn.Parameter(torch.zeros(backbone.config.get_text_config().hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1))  # FSDP shards no scalars
        self.register_buffer("first_sync_index", torch.tensor(sync_index))

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the value before every trained token, shape (tokens,), float32."""
        states = hidden_states(self.backbone, batch, self._settings, self._images).float()
        return states @ self.weight + self.bias


class Critic:
    """Value model and AdamW on the device and the processes of the policy, in float32 as it is.

    It belongs to the trainer alone: it is checkpointed with the policy and never published.

    Attributes:
        state: the parts that a checkpoint stores.
    """

    def __init__(
        self,
        directory: Path,
        settings: TrainerSettings,
        device: torch.device,
        sync_index: int,
        *,
        weights: bool = True,
        processes: Processes = ONE,
        images: ImageInputs | None = None,
    ) -> None:
        """Load the weights of a Hugging Face directory, with a new head and optimiser.

        Args:
            directory: configuration, and weights.
            settings: `critic`, and the optimiser and passes of the policy.
            device: of the policy.
            sync_index: of the version that training starts from; the warm-up counts from here.
            weights: False leaves the weights uninitialized, for a checkpoint that is loaded next.
            processes: that share the model.
            images: inputs of the policy for images; None: it takes none.

        Raises:
            SettingsError: the weights cannot be read, or do not take the policy's images.
        """
        self._settings, self._device, self._processes = settings, device, processes
        self._auxiliary = auxiliary_files(directory)
        causal, self._own_dtypes = (
            load_masters(directory, PATH_SETTING, needs_head=False)
            if weights
            else empty_masters(directory)
        )
        if images is not None:
            images.check_takes(causal, PATH_SETTING)
        model = ValueModel(causal.base_model, settings, sync_index, images).eval()
        # `shard` moves one layer at a time, so no device holds the whole model.
        self.model = model.to(device) if processes.size == 1 else model
        shard(self.model, processes, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.critic.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        self.state: Mapping[str, Stateful] = {
            "critic_model": ModelState(self.model),
            "critic_optimizer": OptimizerState(self.model, self.optimizer),
        }

    def save_configuration(self, directory: Path) -> None:
        """Write what a critic without weights is made from."""
        config = self.model.backbone.config
        save_configuration(directory, self._auxiliary, self._own_dtypes, config)

    def warms_up(self, sync_index: int) -> bool:
        """Return whether only the critic is trained after the version with sync_index."""
        trained = sync_index - int(self.model.first_sync_index)
        return trained < self._settings.critic.warmup_versions

    def values(self, batch: MicroBatch) -> Tensor:
        """Return the value before every trained token, in units of the reward.

        Returns:
            Shape (tokens,), float32, with gradient.
        """
        found: Tensor = self.model(batch)
        return found

    def score(self, sequences: Sequence[TrainingSequence]) -> tuple[TrainingSequence, ...]:
        """Return the sequences with the values as a column.

        Raises:
            SettingsError: a token is not in the critic's vocabulary.
        """
        check_vocabulary(self.model.backbone, sequences, PATH_SETTING)
        found = logprobs_of(sequences, self.values, self._settings, self._device, self._processes)
        return tuple(
            replace(sequence, values=values)
            for sequence, values in zip(sequences, found, strict=True)
        )

    def update(self, sequences: Sequence[TrainingSequence], batch_seq: int) -> CriticStats:
        """Train one batch with the minibatches and passes of the policy.

        A step with a non-finite loss or gradient is skipped.

        Args:
            sequences: of the batch, with values and returns.
            batch_seq: number of the batch; the shuffle depends on it.
        """
        began = time.perf_counter()
        s = self._settings
        losses, skipped = [], []
        for part in minibatches(sequences, s.minibatches, s.epochs, s.seed, batch_seq):
            loss, norm = self._gradient(part)
            if math.isfinite(loss) and math.isfinite(norm):
                self.optimizer.step()
                losses.append(loss)
            else:
                skipped.append(f"value loss {loss}, gradient norm {norm}")
        values, returns = (
            np.concatenate([np.zeros(0), *(getattr(sequence, name) for sequence in sequences)])
            for name in ("values", "returns")
        )
        return CriticStats(
            losses=tuple(losses),
            skipped=tuple(skipped),
            explained_variance=explained_variance(values, returns),
            seconds=time.perf_counter() - began,
        )

    def _gradient(self, sequences: Sequence[TrainingSequence]) -> tuple[float, float]:
        """Compute the gradient of the mean loss over the tokens of a minibatch.

        Returns:
            The loss, and the norm of the gradient before clipping; the same on every process.
        """
        s, processes, total = self._settings, self._processes, 0.0
        tokens = sum(sequence.trained_tokens for sequence in sequences)
        self.optimizer.zero_grad(set_to_none=True)
        for part, counts in processes.passes(sequences, s.micro_batch_tokens, packed=False):
            batch = collate(part, s.temperature, self._device)
            assert batch.values is not None and batch.returns is not None
            losses = value_loss(self.values(batch), batch.values, batch.returns, s.critic.clip)
            loss = losses.sum() / tokens if counts else losses.sum() * 0.0
            # FSDP averages the gradients of the processes; the loss is a sum of their shares.
            (loss * processes.size).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.max_grad_norm)
        return sum(processes.gather(total)), whole(norm).item()

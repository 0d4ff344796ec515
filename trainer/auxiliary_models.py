"""The models beside the policy: reference model, teacher, critic. Each is loaded when needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from torch.distributed.checkpoint.stateful import Stateful

from clawstream.runtime.logs import logger
from clawstream.schemas.algorithms import Column
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.data.sequences import TrainingSequence
from clawstream.trainer.metrics.statistics import CriticStats
from clawstream.trainer.model.critic import PATH_SETTING, Critic
from clawstream.trainer.model.frozen import FrozenColumn, FrozenModel, check_same_tokenizer
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.versions.checkpoint import CRITIC


class AuxiliaryModels:
    """Gives the optional columns of batches, and trains the critic."""

    def __init__(
        self, settings: TrainerSettings, policy: Policy, checkpoint: Path | None = None
    ) -> None:
        """checkpoint: its critic, if it has one, is made without weights, to be loaded next."""
        self._settings, self._policy = settings, policy
        self._frozen: dict[FrozenColumn, FrozenModel] = {}
        self._trained: Critic | None = None
        if checkpoint is not None and (checkpoint / CRITIC).exists():
            self._trained = Critic(
                checkpoint / CRITIC,
                settings,
                policy.device,
                sync_index=0,
                weights=False,
                processes=policy.processes,
                images=policy.images,
            )

    @property
    def state(self) -> Mapping[str, Stateful]:
        """The parts that a checkpoint stores: those of the critic."""
        return {} if self._trained is None else self._trained.state

    @property
    def configurations(self) -> Mapping[str, Callable[[Path], None]]:
        """Name of a directory of a checkpoint to what writes a model's configuration to it."""
        return {} if self._trained is None else {CRITIC: self._trained.save_configuration}

    def score(
        self, sequences: tuple[TrainingSequence, ...], columns: Collection[Column], sync_index: int
    ) -> tuple[TrainingSequence, ...]:
        """Return the sequences with these columns.

        Args:
            sequences: of a batch.
            columns: that its algorithm needs.
            sync_index: of the version that training starts from.

        Raises:
            SettingsError: a model is not set, cannot be loaded, or has another vocabulary.
        """
        for column in sorted(columns):
            model = self._critic(sync_index) if column == "values" else self._frozen_model(column)
            sequences = model.score(sequences)
        return sequences

    def train_critic(
        self, sequences: Sequence[TrainingSequence], batch_seq: int
    ) -> CriticStats | None:
        """Train the critic on the sequences with returns; None if there are none.

        Args:
            sequences: of a batch, of all environments.
            batch_seq: number of the batch; the shuffle depends on it.
        """
        learned = [sequence for sequence in sequences if sequence.returns is not None]
        if not learned or self._trained is None:
            return None
        stats = self._trained.update(learned, batch_seq)
        for reason in stats.skipped:
            logger().error(
                "critic_update_skipped",
                batch_seq=batch_seq,
                reason=reason,
                action="critic and its optimiser stay as before it; lower trainer.critic.lr",
            )
        return stats

    def critic_warms_up(self, sync_index: int) -> bool:
        """Return whether the policy does not learn yet from sequences with returns."""
        return self._trained is not None and self._trained.warms_up(sync_index)

    def _critic(self, sync_index: int) -> Critic:
        if self._trained is None:
            s, policy = self._settings, self._policy
            directory = s.critic.path or s.model_path
            if directory is None:
                raise SettingsError(f"setting {PATH_SETTING}: not set, nor is trainer.model_path")
            check_same_tokenizer(directory, policy.tokenizer_fingerprint, PATH_SETTING)
            self._trained = Critic(
                directory,
                s,
                policy.device,
                sync_index,
                processes=policy.processes,
                images=policy.images,
            )
        return self._trained

    def _frozen_model(self, column: FrozenColumn) -> FrozenModel:
        if column not in self._frozen:
            policy = self._policy
            self._frozen[column] = FrozenModel(
                column,
                self._settings,
                policy.device,
                policy.tokenizer_fingerprint,
                policy.processes,
                policy.images,
            )
        return self._frozen[column]

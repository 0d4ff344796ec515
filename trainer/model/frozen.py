"""A model that is not trained: reference policy or teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clawstream.schemas.errors import SettingsError
from clawstream.trainer.data.micro_batch import MicroBatch
from clawstream.trainer.data.sequences import TrainingSequence
from clawstream.trainer.model.files import load_masters
from clawstream.trainer.model.scores import Scores, logprobs_of
from clawstream.trainer.model.tokenizer import tokenizer_fingerprint
from clawstream.trainer.parallel.processes import ONE, Processes
from clawstream.trainer.parallel.sharding import shard
from clawstream.trainer.vision.inputs import ImageInputs

if TYPE_CHECKING:
    from clawstream.schemas.settings import TrainerSettings

FrozenColumn = Literal["ref_logprobs", "teacher_logprobs"]
SETTINGS: Mapping[FrozenColumn, str] = {
    "ref_logprobs": "reference_path",
    "teacher_logprobs": "teacher_path",
}
"""The setting with the directory of the model that gives an optional column of a batch."""


class FrozenModel:
    """Float32 weights of a Hugging Face directory on a device, without optimiser."""

    def __init__(
        self,
        column: FrozenColumn,
        settings: TrainerSettings,
        device: torch.device,
        tokenizer: str | None,
        processes: Processes = ONE,
        images: ImageInputs | None = None,
    ) -> None:
        """Load the model that gives a column.

        Args:
            column: of a batch.
            settings: name the model's directory.
            device: of the model.
            tokenizer: fingerprint of the policy's tokenizer; None: not known.
            processes: that share the model.
            images: inputs of the policy for images; None: it takes none.

        Raises:
            SettingsError: none is set, its weights cannot be read, its tokenizer is another one, or
                it does not take the policy's images.
        """
        self._column, self._settings, self._device = column, settings, device
        self._setting = f"trainer.{SETTINGS[column]}"
        directory = getattr(settings, SETTINGS[column])
        if directory is None:
            raise SettingsError(f"setting {self._setting}: the algorithm needs it")
        check_same_tokenizer(directory, tokenizer, self._setting)
        model, _ = load_masters(directory, self._setting)
        if images is not None:
            images.check_takes(model, self._setting)
        # `shard` moves one layer at a time, so no device holds the whole model.
        self.model = (model.to(device) if processes.size == 1 else model).eval()
        self.model.requires_grad_(False)
        self._scores, self._processes = Scores(self.model, settings, images), processes
        shard(self._scores, processes, device)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of every trained token, shape (tokens,)."""
        return self._scores.logprobs(batch)

    def score(self, sequences: Sequence[TrainingSequence]) -> tuple[TrainingSequence, ...]:
        """Return the sequences with this model's log-probabilities as a column.

        Raises:
            SettingsError: a token is not in the model's vocabulary.
        """
        check_vocabulary(self.model, sequences, self._setting)
        found = logprobs_of(
            sequences,
            self.logprobs,
            self._settings,
            self._device,
            self._processes,
            packed=self._scores.packed,
        )
        columns: list[dict[str, Any]] = [{self._column: values} for values in found]
        return tuple(
            replace(sequence, **values) for sequence, values in zip(sequences, columns, strict=True)
        )


def check_vocabulary(
    model: PreTrainedModel, sequences: Sequence[TrainingSequence], setting: str
) -> None:
    """Raise SettingsError when the sequences have a token id that the model does not have.

    Args:
        model: another one than the policy.
        sequences: of a batch.
        setting: that names the model, for the error.
    """
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    largest = max((int(s.tokens.ids.max()) for s in sequences), default=0)
    if largest >= vocabulary:
        raise SettingsError(
            f"setting {setting}: the model has {vocabulary} token ids, and the batch has id "
            f"{largest}: it needs the tokenizer of the policy"
        )


def check_same_tokenizer(directory: Path, tokenizer: str | None, setting: str) -> None:
    """Raise SettingsError when the tokenizer of another model is not the policy's.

    Args:
        directory: of the other model.
        tokenizer: fingerprint of the policy's; None: not known.
        setting: that names the directory, for the error.
    """
    own = tokenizer_fingerprint(directory)
    if tokenizer is not None and own is not None and own != tokenizer:
        raise SettingsError(
            f"setting {setting}: its tokenizer has the fingerprint {own}, and the policy's "
            f"{tokenizer}: both models must have the same tokenizer"
        )

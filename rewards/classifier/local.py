"""A sequence classifier of Hugging Face in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rewards.classifier import reward
from schemas.records import Trajectory
from schemas.settings.reward_models import Classifier
from schemas.user_function import batched


def local_classifier(settings: Classifier) -> Callable[[Sequence[Trajectory]], list[float]]:
    """Load the model; return the reward function of a batch.

    Raises:
        OSError: There is no model in the folder.
    """
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = AutoModelForSequenceClassification.from_pretrained(settings.model)
    model = model.to(settings.device).eval()
    if tokenizer.pad_token is None:  # as with language models that became reward models
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    longest = getattr(model.config, "max_position_embeddings", None)

    @batched(settings.batch_size)
    def rewards(trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the score of each trajectory.

        Raises:
            ValueError: A text is too long, or a trajectory lacks what the templates need.
        """
        pairs = [reward.texts(settings, trajectory) for trajectory in trajectories]
        firsts = [text if query is None else query for query, text in pairs]
        seconds = None if settings.query is None else [text for _, text in pairs]
        given = tokenizer(firsts, seconds, padding=True, return_tensors="pt").to(settings.device)
        length = given["input_ids"].shape[1]
        if longest is not None and length > longest:
            raise ValueError(f"the text has {length} tokens; the model takes {longest}")
        with torch.inference_mode():
            logits = model(**given).logits.float()
        if not settings.raw:
            one = logits.shape[1] == 1
            logits = torch.sigmoid(logits) if one else torch.softmax(logits, dim=1)
        return [float(value) for value in logits[:, settings.label]]

    return rewards

"""A sequence classifier of Hugging Face in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rewards.classifier import reward
from schemas.records import Trajectory
from schemas.settings.reward_models import Classifier
from schemas.user_function import batched

Value = float | tuple[None, dict[str, Any]]


def local_classifier(settings: Classifier) -> Callable[[Sequence[Trajectory]], list[Value]]:
    """Load the model; return the reward function of a batch.

    Raises:
        OSError: There is no model in the folder.
        ValueError: The model has no such output.
    """
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = AutoModelForSequenceClassification.from_pretrained(settings.model)
    model = model.to(settings.device).eval()
    if tokenizer.pad_token is None:  # as with language models that became reward models
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    outputs = model.config.num_labels
    if not -outputs <= settings.label < outputs:
        raise ValueError(f"label={settings.label}: {settings.model} has {outputs} outputs")
    longest = getattr(model.config, "max_position_embeddings", None)

    @batched(settings.batch_size)
    def rewards(trajectories: Sequence[Trajectory]) -> list[Value]:
        """Return the score of each trajectory; None with the length of a text that is too long.

        Raises:
            ValueError: A trajectory lacks what the templates need.
        """
        pairs = [reward.texts(settings, trajectory) for trajectory in trajectories]
        inputs = [
            tokenizer(text) if query is None else tokenizer(query, text) for query, text in pairs
        ]
        lengths = [len(each["input_ids"]) for each in inputs]
        fit = [i for i, n in enumerate(lengths) if longest is None or n <= longest]
        results: list[Value] = [(None, {"tokens": n, "tokens_max": longest}) for n in lengths]
        if fit:
            given = tokenizer.pad([inputs[i] for i in fit], return_tensors="pt")
            for i, value in zip(fit, scores(given.to(settings.device)), strict=True):
                results[i] = value
        return results

    def scores(given: Any) -> list[float]:
        with torch.inference_mode():
            logits = model(**given).logits.float()
        if not settings.raw:
            one = logits.shape[1] == 1
            logits = torch.sigmoid(logits) if one else torch.softmax(logits, dim=1)
        return [float(value) for value in logits[:, settings.label]]

    return rewards

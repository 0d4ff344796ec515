"""A sequence classifier of Hugging Face in this process.

A classifier on a causal language model scores every token; its reward is the score of the text's
last one. Transformers finds that token by searching for padding, and finds another one where a text
ends with the padding token or the settings of tokenizer and model differ. Its place is known here,
so it is taken directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from clawstream.rewards.classifier.input_texts import texts
from clawstream.schemas.records import Trajectory
from clawstream.schemas.settings.reward_models import Classifier
from clawstream.schemas.user_function import batched

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
    scores_tokens = hasattr(model, "score") and not model.config.is_encoder_decoder
    if tokenizer.pad_token is not None:
        model.config.pad_token_id = tokenizer.pad_token_id
    outputs = model.config.num_labels
    if not -outputs <= settings.label < outputs:
        raise ValueError(f"label={settings.label}: {settings.model} has {outputs} outputs")
    longest = getattr(model.config, "max_position_embeddings", None)

    @batched(settings.batch_size)
    def rewards(trajectories: Sequence[Trajectory]) -> list[Value]:
        """Return the score of each trajectory; None with the length of a text that has none.

        That is a text without tokens, or with more than the model has positions.

        Raises:
            ValueError: A trajectory lacks what the templates need.
        """
        pairs = [texts(settings, trajectory) for trajectory in trajectories]
        inputs = [
            tokenizer(text) if query is None else tokenizer(query, text) for query, text in pairs
        ]
        lengths = [len(each["input_ids"]) for each in inputs]
        fit = [i for i, n in enumerate(lengths) if n > 0 and (longest is None or n <= longest)]
        results: list[Value] = [(None, {"tokens": n, "tokens_max": longest}) for n in lengths]
        at_once = len(fit) if scores_tokens or tokenizer.pad_token is not None else 1
        for some in (fit[i : i + at_once] for i in range(0, len(fit), at_once or 1)):
            with torch.inference_mode():
                found = (of_last_tokens if scores_tokens else of_texts)([inputs[i] for i in some])
            for i, value in zip(some, values(found.float()), strict=True):
                results[i] = value
        return results

    def of_last_tokens(inputs: Sequence[Any]) -> Any:
        lengths = [len(each["input_ids"]) for each in inputs]
        given = {  # what follows the last token changes nothing: it is masked, and the model causal
            name: torch.tensor(
                [each[name] + [0] * (max(lengths) - len(each[name])) for each in inputs]
            )
            for name in inputs[0]
        }
        hidden = model.base_model(**{name: ids.to(model.device) for name, ids in given.items()})[0]
        return model.score(hidden[range(len(lengths)), [n - 1 for n in lengths]])

    def of_texts(inputs: Sequence[Any]) -> Any:
        padding = len(inputs) > 1  # one text needs no padding token
        given = tokenizer.pad(list(inputs), padding=padding, return_tensors="pt")
        return model(**given.to(model.device)).logits

    def values(logits: Any) -> list[float]:
        if not settings.raw:
            one = logits.shape[1] == 1
            logits = torch.sigmoid(logits) if one else torch.softmax(logits, dim=1)
        return [float(value) for value in logits[:, settings.label]]

    return rewards

"""Reward trajectories by a sequence classifier: local, or vLLM's `/classify` and `/score`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clawstream.rewards.classifier.input_texts import texts
from clawstream.rewards.endpoint import Endpoint, EndpointError
from clawstream.rewards.template import check_template
from clawstream.schemas.records import Trajectory
from clawstream.schemas.settings.reward_models import Classifier


def classifier(configuration: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the reward function of a configuration (`Classifier`).

    Raises:
        EndpointError: The API key is missing.
        ValueError: A template has an unknown placeholder.
        OSError: The local model cannot be loaded.
    """
    settings = Classifier.model_validate(configuration)
    for template in (settings.template, settings.query or ""):
        check_template(template)
    if settings.url is not None:
        return _at_endpoint(settings, settings.url)
    from clawstream.rewards.classifier.local import (
        local_classifier,
    )  # torch, for a local model only

    return local_classifier(settings)


def _at_endpoint(settings: Classifier, url: str) -> Callable[[Trajectory], Any]:
    endpoint = Endpoint(url, settings.api_key_env, settings.attempts, settings.timeout_s)

    async def reward(trajectory: Trajectory) -> float:
        """Return the score.

        Raises:
            EndpointError: The endpoint is down, slow, or replies with something else.
            ValueError: The trajectory lacks what the templates need.
        """
        query, text = texts(settings, trajectory)
        body: dict[str, Any] = {"model": settings.model, "use_activation": not settings.raw}
        if query is None:
            path, body["input"] = "/classify", [text]
        else:
            path, body["text_1"], body["text_2"] = "/score", query, text
        reply = await endpoint.post(path, body)
        try:
            (found,) = reply["data"]
            return float(found["probs"][settings.label] if query is None else found["score"])
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise EndpointError(f"the reply of {url}{path} has no score") from e

    return reward

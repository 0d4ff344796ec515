"""Claw-R1's white-box agents on this SDK: `AgentFlowBase` and its registry.

A subclass owns its tokens: it renders prompts, samples by `/generate` and submits its steps, as in
Claw-R1 (docs/claw-r1.md). Trajectories, groups, retries and the rollout budget are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import httpx

from clawstream.agent_flow.errors import FlowError, RolloutFailed
from clawstream.agent_flow.flow import Flow, Limits
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task

DEFAULT_AGENT = "single_step_single_turn_agent"
_AGENTS: dict[str, type[AgentFlowBase]] = {}
A = TypeVar("A", bound="type[AgentFlowBase]")


@dataclass(frozen=True, slots=True)
class Generated:
    """A reply of `/generate`.

    Attributes:
        token_ids: of the response.
        log_probs: of each of them.
        versions: spans of weight versions; copy them to the step.
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStep:
    """A step to submit: one sampled response with its whole prompt."""

    prompt_ids: list[int]
    response_ids: list[int]
    rollout_log_probs: list[float]
    versions: list[dict[str, Any]]
    step_index: int = 0
    is_last: bool = False
    metadata: Mapping[str, Any] | None = None


class AgentFlowBase:
    """Base class of white-box agents. Subclasses implement `run`.

    Attributes:
        rollout: the rollout that is played.
        tokenizer: a Hugging Face tokenizer with a chat template.
        reward: of the trajectory, if `run` sets it; None: a reward function gives it.
    """

    def __init__(self, rollout: Rollout, tokenizer: Any, http: httpx.AsyncClient) -> None:
        self.rollout, self.tokenizer, self._http = rollout, tokenizer, http
        self.reward: float | None = None

    async def run(self, sampling_params: dict[str, Any], **dataset_fields: Any) -> int:
        """Play a task and return the number of submitted steps.

        Args:
            sampling_params: of the flow.
            dataset_fields: fields of the task; `raw_prompt` has the messages of its `prompt`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement run")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Return the ids of a prompt, with the start of the reply."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=True, return_dict=False
        )
        return ids

    async def gateway_generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> Generated:
        """Sample a response from the policy.

        Raises:
            RolloutFailed: The gateway or the engine refused it.
        """
        body = {"prompt_ids": list(prompt_ids), "sampling_params": dict(sampling_params)}
        reply = await self._post("/generate", body)
        return Generated(reply["token_ids"], reply["log_probs"], reply["versions"])

    async def gateway_compute_reward(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], **dataset_fields: Any
    ) -> float:
        """Return the value of the gateway's reward function (`gateway.compute_reward`).

        Raises:
            RolloutFailed: It has none, or the function failed.
        """
        body = {"prompt_ids": list(prompt_ids), "response_ids": list(response_ids)}
        reply = await self._post("/compute_reward", {**body, "dataset_fields": dataset_fields})
        return float(reply["reward_score"])

    async def gateway_submit_steps(self, steps: Sequence[AgentStep]) -> int:
        """Record steps; return how many were accepted.

        Raises:
            RolloutFailed: The gateway refused them.
        """
        path = f"/submit_steps?channel={self.rollout.place.channel}"
        place = {"trajectory_uid": self.rollout.key, "prompt_uid": self.rollout.group}
        reply = await self._post(path, {"steps": [{**asdict(step), **place} for step in steps]})
        return int(reply["accepted"])

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        url = self.rollout.base_url.removesuffix("/v1") + path
        try:
            reply = await self._http.post(url, json=body, headers=self.rollout.headers)
        except httpx.HTTPError as error:
            raise RolloutFailed(f"POST {url}: {error!r}") from error
        if reply.status_code >= 300:
            raise RolloutFailed(f"POST {url}: {reply.status_code} {reply.text[:300]}")
        found: dict[str, Any] = reply.json()
        return found


def register(name: str) -> Callable[[A], A]:
    """Decorate a subclass of AgentFlowBase to give it a name."""

    def add(agent: A) -> A:
        _AGENTS[name] = agent
        return agent

    return add


@register(DEFAULT_AGENT)
class SingleStepSingleTurnAgentFlow(AgentFlowBase):
    """One prompt, one response, one step; the reward comes from a reward function."""

    async def run(self, sampling_params: dict[str, Any], **dataset_fields: Any) -> int:
        """See AgentFlowBase. Raises RolloutFailed for a task without a prompt."""
        if "raw_prompt" not in dataset_fields:
            raise RolloutFailed("the task has no messages in `prompt`")
        prompt = self.apply_chat_template(dataset_fields["raw_prompt"])
        reply = await self.gateway_generate(prompt, sampling_params)
        step = AgentStep(
            prompt_ids=prompt,
            response_ids=reply.token_ids,
            rollout_log_probs=reply.log_probs,
            versions=reply.versions,
        )
        return await self.gateway_submit_steps([step])


def claw_r1_flow(
    tokenizer: Any,
    agent: str = DEFAULT_AGENT,
    sampling_params: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
) -> Flow:
    """Return the flow that plays each task by a registered agent.

    Args:
        tokenizer: a Hugging Face tokenizer, or a directory of one.
        agent: its registered name.
        sampling_params: of the engine, for example `{"max_tokens": 512}`.
        limits: of the flow.

    Raises:
        FlowError: No agent has this name.
    """
    if agent not in _AGENTS:
        raise FlowError(f"agent {agent!r}: not registered; there are {', '.join(sorted(_AGENTS))}")
    loaded = _tokenizer(tokenizer)

    async def play(task: Task, rollout: Rollout) -> float | None:
        fields = dict(task)
        if "prompt" in fields:
            fields["raw_prompt"] = fields["prompt"]
        async with httpx.AsyncClient(timeout=None) as http:
            player = _AGENTS[agent](rollout, loaded, http)
            await player.run({**(sampling_params or {}), **rollout.sampling}, **fields)
        return player.reward

    return Flow(play, limits or Limits(), agent)


def _tokenizer(tokenizer: Any) -> Any:
    if hasattr(tokenizer, "apply_chat_template"):
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)

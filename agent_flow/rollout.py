"""A rollout: one recorded attempt at a task, and the clients that reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from clawstream.agent_flow.chat.loop import Prompt, Reply, chat
from clawstream.agent_flow.chat.stream import Message
from clawstream.agent_flow.chat.tools import Tool
from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.gateway.client import Place, Session
from clawstream.agent_flow.outcome import Reward, checked_number

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI


@dataclass
class Rollout:
    """One attempt at a task. Every call through it is a step of its trajectory.

    Attributes:
        key: of the trajectory.
        group: the task's group; its rollouts are compared with each other.
        base_url: for any OpenAI-compatible client; ends with `/v1`.
        api_key: reaches this trajectory and nothing else.
        model: name that clients send.
        sampling: temperature and the like, which `chat` sends.
        openai: OpenAI client of this rollout; connections are shared with other rollouts.
        reward: of this rollout, if it is another agent's (see `agent`); as a flow returns it.
        chats: messages of each conversation, in the order in which they ended.
        agents: tasks that open other agents' rollouts, by name.
    """

    place: Place
    session: Session
    model: str
    sampling: Mapping[str, Any]
    openai: AsyncOpenAI
    open_agent: Callable[[str], Coroutine[Any, Any, Rollout]]
    give_reward: Callable[[Place, str, float, str | None], Awaitable[None]]
    reward: Reward = None
    chats: list[list[Message]] = field(default_factory=list)
    agents: dict[str, asyncio.Task[Rollout]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.place.key

    @property
    def group(self) -> str:
        return self.place.group

    @property
    def base_url(self) -> str:
        return self.session.base_url

    @property
    def api_key(self) -> str:
        return self.session.api_key

    @property
    def headers(self) -> dict[str, str]:
        """For any HTTP client."""
        return {"authorization": f"Bearer {self.api_key}"}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which agents find the gateway."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }

    @cached_property
    def anthropic(self) -> AsyncAnthropic:
        """Anthropic client of this rollout."""
        try:
            from anthropic import AsyncAnthropic
        except ImportError as error:
            raise FlowError("rollout.anthropic needs the package anthropic") from error
        return AsyncAnthropic(
            base_url=self.base_url.removesuffix("/v1"),
            api_key=self.api_key,
            max_retries=self.openai.max_retries,
            timeout=self.openai.timeout,
        )

    async def chat(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Callable[..., Any] | Tool] = (),
        max_turns: int | None = None,
        **request: Any,
    ) -> Reply:
        """Chat with the model until it calls no tool.

        Args:
            prompt: text of a user message, or messages in OpenAI's form, images included.
            tools: Python functions, sync or async, with type hints and a docstring. What one
                raises is its result: the model sees it.
            max_turns: calls of the model at most; default: 1, with tools 2.
            request: further fields of the request, such as max_tokens. With `stream=True` the
                replies are streamed and recorded as streams; the result is the same.

        Raises:
            openai.OpenAIError: A call failed after its retries.
            FlowError: A function cannot be a tool, max_turns is not positive, or a stream ended
                before its reply.
        """
        turns = (2 if tools else 1) if max_turns is None else max_turns
        if turns < 1:
            raise FlowError(f"max_turns={turns}: must be above 0")
        fields = {"model": self.model, **self.sampling, **request}
        reply = await chat(self.openai, prompt, tools, turns, fields)
        if self.chats and reply.messages[: len(self.chats[-1])] == self.chats[-1]:
            self.chats.pop()  # continued by this one
        self.chats.append(reply.messages)
        return reply

    async def agent(self, name: str) -> Rollout:
        """Return another agent's rollout of the same task: a trajectory in a group of its own.

        Set its `reward`; it ends with this rollout. Agents that share a reward and a context need
        none of this: several chats of one rollout are branches of one trajectory.

        Args:
            name: of the agent, equal in all rollouts; a second call returns the same rollout.

        Raises:
            FlowError: The name is a number, or the gateway refuses it.
        """
        if name.isdecimal():
            raise FlowError(f"agent {name!r}: a name must not be a number, which counts attempts")
        # A task, because several chats may ask for the same agent at once, and because a trajectory
        # that is opened must be known and ended even if who asked for it is cancelled.
        if name not in self.agents:
            self.agents[name] = asyncio.create_task(self.open_agent(name))
        return await asyncio.shield(self.agents[name])

    async def opened_agents(self) -> list[Rollout]:
        """Return the rollouts of other agents, after all pending session requests have ended."""
        opened = await asyncio.gather(*self.agents.values(), return_exceptions=True)
        return [rollout for rollout in opened if isinstance(rollout, Rollout)]

    async def step_reward(self, step_id: str | None, value: float, name: str = "step") -> None:
        """Reward one step, for algorithms with credit of steps.

        Args:
            step_id: `Reply.step_id`, or header `x-clawstream-step` of a reply.
            value: the reward.
            name: of the reward.

        Raises:
            RolloutFailed: It is no finite number.
            FlowError: The gateway refuses it, or step_id is None.
        """
        if step_id is None:
            raise FlowError("step_reward: the reply has no step id; was it sent by a gateway?")
        await self.give_reward(
            self.place, name, checked_number(value, f"step reward {name!r}"), step_id
        )

    async def close(self) -> None:
        """Close what `anthropic` opened."""
        if "anthropic" in self.__dict__:
            await self.anthropic.close()

"""The official clients of every protocol, and a common form for their view of a reply.

Each protocol has its own helpers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, LengthFinishReasonError

from clawstream.demo.task import TOOLS as DEMO_TOOLS

THINK, THOUGHT = "<think>", "</think>"
SCHEMA = DEMO_TOOLS[0]["function"]["parameters"] | {"additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "lookup", "strict": True, "parameters": SCHEMA}}
]
"""Strict, because the helpers of the OpenAI client accept no other tools."""


def call_text(name: str, arguments: str) -> str:
    """Return a tool call as the chat template renders it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@dataclass(frozen=True)
class Seen:
    """A choice as a client sees it.

    calls: name and arguments. finish: in the protocol's own terms. logprobs: None when the reply
    has none.
    """

    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    finish: str | None = field(default=None, compare=False)
    logprobs: tuple[float, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # A busy engine streams several tokens at once. Its parser then leaves the opening tag in
        # the reasoning.
        object.__setattr__(self, "reasoning", self.reasoning.removeprefix(THINK))

    def text(self, tail: str = THOUGHT) -> str:
        """Return the text that the model must have sampled. tail: text after the reasoning."""
        reasoning = THINK + self.reasoning + tail if self.reasoning else ""
        return reasoning + self.content + "".join(call_text(*call) for call in self.calls)


class Speaker(Protocol):
    """A protocol with its official client.

    base_url: of the gateway, with trajectory and prompt, without /v1.
    """

    name: str
    path: str
    finishes: Mapping[str, str]
    """The protocol's own finish reasons, mapped to those of the record."""
    raw: bool
    """Whether text shows special tokens; the parsers of tools and reasoning need them."""

    async def ask(
        self, base_url: str, said: Any, tools: bool, stream: bool, **more: Any
    ) -> list[Seen]:
        """Ask, and read the reply with the client's own types.

        said: a question, or a conversation in the protocol's form.
        """
        ...

    def turns(self, question: str, seen: Seen, result: str) -> Any:
        """Return the conversation after a reply with calls and their results."""
        ...


@asynccontextmanager
async def openai_client(base_url: str, key: str = "none") -> Any:
    """Yield the official client without retries."""
    async with AsyncOpenAI(
        base_url=base_url + "/v1", api_key=key, max_retries=0, timeout=300
    ) as client:
        yield client


@asynccontextmanager
async def anthropic_client(base_url: str, key: str = "none") -> Any:
    """Yield the official client without retries."""
    async with AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0, timeout=300) as client:
        yield client


class Chat:
    """Chat completions; streams through `client.chat.completions.stream`."""

    name = "openai.chat"
    path = "/v1/chat/completions"
    finishes: Mapping[str, str] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}
    raw = True

    async def ask(
        self, base_url: str, said: Any, tools: bool, stream: bool, **more: Any
    ) -> list[Seen]:
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        body: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 60} | more
        if tools:
            body["tools"] = TOOLS
        async with openai_client(base_url) as client:
            reply = await (
                self._streamed(client, body) if stream else client.chat.completions.create(**body)
            )
        return [
            self._seen(choice) for choice in sorted(reply.choices, key=lambda choice: choice.index)
        ]

    async def _streamed(self, client: AsyncOpenAI, body: dict[str, Any]) -> Any:
        async with client.chat.completions.stream(**body) as events:
            async for event in events:
                assert event.type
            try:
                return await events.get_final_completion()
            except (
                LengthFinishReasonError
            ) as error:  # the client's own error for a reply that is cut off
                return error.completion

    def _seen(self, choice: Any) -> Seen:
        message, told = choice.message, choice.logprobs
        calls = tuple((c.function.name, c.function.arguments) for c in message.tool_calls or ())
        logprobs = tuple(entry.logprob for entry in told.content) if told is not None else None
        return Seen(
            message.content or "",
            calls,
            getattr(message, "reasoning", None) or "",
            choice.finish_reason,
            logprobs,
        )

    def turns(self, question: str, seen: Seen, result: str) -> Any:
        calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(seen.calls)
        ]
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": seen.content or None, "tool_calls": calls},
            *({"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls),
        ]


class Completions:
    """Completions, which support neither tools nor conversations."""

    name = "openai.completions"
    path = "/v1/completions"
    finishes: Mapping[str, str] = {"stop": "stop", "length": "length"}
    raw = False

    async def ask(
        self, base_url: str, said: Any, tools: bool, stream: bool, **more: Any
    ) -> list[Seen]:
        body: dict[str, Any] = {"model": "policy", "prompt": said, "max_tokens": 60} | more
        async with openai_client(base_url) as client:
            if not stream:
                choices = (await client.completions.create(**body)).choices
            else:
                choices = [
                    c
                    async for chunk in await client.completions.create(stream=True, **body)
                    for c in chunk.choices
                ]
        return [
            self._seen([c for c in choices if c.index == index])
            for index in sorted({c.index for c in choices})
        ]

    def _seen(self, choices: Sequence[Any]) -> Seen:
        told = [c.logprobs.token_logprobs for c in choices if c.logprobs is not None]
        logprobs = tuple(p for part in told for p in part) if told else None
        return Seen(
            "".join(c.text for c in choices), finish=choices[-1].finish_reason, logprobs=logprobs
        )

    def turns(self, question: str, seen: Seen, result: str) -> Any:
        raise NotImplementedError


class Responses:
    """Responses; streams through `client.responses.stream`."""

    name = "openai.responses"
    path = "/v1/responses"
    finishes: Mapping[str, str] = {"completed": "stop", "incomplete": "length"}
    raw = True

    async def ask(
        self, base_url: str, said: Any, tools: bool, stream: bool, **more: Any
    ) -> list[Seen]:
        body: dict[str, Any] = {
            "model": "policy",
            "input": said,
            "max_output_tokens": more.pop("max_tokens", 60),
            **more,
        }
        if tools:
            body["tools"] = [{"type": "function", **tool["function"]} for tool in TOOLS]
        body["extra_body"] = {name: body.pop(name) for name in ("seed", "stop") if name in body}
        async with openai_client(base_url) as client:
            if not stream:
                return [self._seen(await client.responses.create(**body))]
            async with client.responses.stream(**body) as events:
                said_so_far = "".join(
                    [e.delta async for e in events if e.type == "response.output_text.delta"]
                )
                seen = self._seen(await events.get_final_response())
                assert said_so_far == seen.content
                return [seen]

    def _seen(self, response: Any) -> Seen:
        messages = [
            part for item in response.output if item.type == "message" for part in item.content
        ]
        reasons = [
            part.text
            for item in response.output
            if item.type == "reasoning"
            for part in item.content or ()
        ]
        told = [entry.logprob for part in messages for entry in part.logprobs or ()]
        return Seen(
            "".join(part.text for part in messages),
            tuple(
                (item.name, item.arguments)
                for item in response.output
                if item.type == "function_call"
            ),
            "".join(reasons), response.status, tuple(told) or None,
        )  # fmt: skip

    def turns(self, question: str, seen: Seen, result: str) -> Any:
        said = [{"role": "assistant", "content": seen.content}] if seen.content else []
        calls = [
            {"type": "function_call", "call_id": f"c{i}", "name": name, "arguments": arguments}
            for i, (name, arguments) in enumerate(seen.calls)
        ]
        results = [
            {"type": "function_call_output", "call_id": c["call_id"], "output": result}
            for c in calls
        ]
        return [{"role": "user", "content": question}, *said, *calls, *results]


class Messages:
    """Anthropic's messages; streams through `client.messages.stream`."""

    name = "anthropic.messages"
    path = "/v1/messages"
    finishes: Mapping[str, str] = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "tool_use": "tool_calls",
    }
    raw = True

    async def ask(
        self, base_url: str, said: Any, tools: bool, stream: bool, **more: Any
    ) -> list[Seen]:
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        body: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 60} | more
        if tools:
            body["tools"] = [
                {"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in TOOLS
            ]
        body["extra_body"] = {
            name: body.pop(name) for name in ("temperature", "seed") if name in body
        }
        async with anthropic_client(base_url) as client:
            if not stream:
                return [self._seen(await client.messages.create(**body))]
            async with client.messages.stream(**body) as events:
                said_so_far = "".join([text async for text in events.text_stream])
                seen = self._seen(await events.get_final_message())
                assert said_so_far == seen.content
                return [seen]

    def _seen(self, message: Any) -> Seen:
        blocks = message.content
        return Seen(
            "".join(block.text for block in blocks if block.type == "text"),
            tuple(
                (block.name, json.dumps(block.input))
                for block in blocks
                if block.type == "tool_use"
            ),
            "".join(block.thinking for block in blocks if block.type == "thinking"),
            message.stop_reason,
        )

    def turns(self, question: str, seen: Seen, result: str) -> Any:
        said = [{"type": "text", "text": seen.content}] if seen.content else []
        calls = [
            {"type": "tool_use", "id": f"c{i}", "name": name, "input": json.loads(arguments)}
            for i, (name, arguments) in enumerate(seen.calls)
        ]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls
        ]
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [*said, *calls]},
            {"role": "user", "content": results},
        ]


SPEAKERS: Mapping[str, Speaker] = {
    s.name: s for s in (Chat(), Completions(), Responses(), Messages())
}

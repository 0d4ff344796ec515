"""The loop of a chat with tools: call the model, run its tool calls side by side, repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clawstream.agent_flow.chat.stream import Message, StreamedMessage
from clawstream.agent_flow.chat.tools import Tool, tools_of
from clawstream.agent_flow.errors import RolloutFailed

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a chat.

    Attributes:
        text: content of the last reply; empty if it has none.
        messages: the whole conversation, with the prompt, tool results and the last reply. Pass
            them to the next `chat` with another user message to go on.
        turns: calls of the model.
        tool_calls: names of the tools that were called, in order.
        finish_reason: of the last reply; `tool_calls` if `max_turns` ended the chat.
        step_id: of the last reply, for a reward of that step.
    """

    text: str
    messages: list[Message]
    turns: int
    tool_calls: tuple[str, ...]
    finish_reason: str | None
    step_id: str | None


async def chat(
    client: AsyncOpenAI,
    prompt: Prompt,
    functions: Sequence[Callable[..., Any] | Tool],
    max_turns: int,
    request: Mapping[str, Any],
) -> Reply:
    """Chat until the model calls no tool, or max_turns calls were made.

    Args:
        client: for the rollout's base URL.
        prompt: text of a user message, or messages.
        functions: tools; calls of one reply run side by side.
        max_turns: calls of the model at most.
        request: further fields of each request, with the model; `stream` changes no reply.

    Raises:
        openai.OpenAIError: A call failed after its retries.
        RolloutFailed: A stream ended before its reply.
    """
    tools = tools_of(functions)
    messages: list[Message] = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [dict(message) for message in prompt]
    )
    fields = dict(request)
    if tools:
        fields["tools"] = [tool.definition for tool in tools.values()]
    called: list[str] = []
    create: Any = client.chat.completions.with_raw_response.create
    for turn in range(1, max_turns + 1):
        raw = await create(messages=messages, **fields)
        message, finish_reason = await _message(raw.parse(), streamed=bool(fields.get("stream")))
        messages.append(message)
        calls = [call for call in message.get("tool_calls", ()) if call["type"] == "function"]
        if not calls or turn == max_turns:
            break
        functions_called = [call["function"] for call in calls]
        called += [function["name"] for function in functions_called]
        results = await asyncio.gather(
            *(_call(tools, f["name"], f.get("arguments", "")) for f in functions_called)
        )
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
    return Reply(
        text=message.get("content") or "",
        messages=messages,
        turns=turn,
        tool_calls=tuple(called),
        finish_reason=finish_reason,
        step_id=raw.headers.get("x-clawstream-step"),
    )


async def _message(reply: Any, streamed: bool) -> tuple[Message, str | None]:
    """Return the message and the finish reason of a reply, which may be a stream."""
    if not streamed:
        choice = reply.choices[0]
        message = choice.message.model_dump(exclude_none=True, exclude={"function_call"})
        return message, choice.finish_reason
    whole = StreamedMessage()
    async with reply:
        async for chunk in reply:
            for choice in chunk.choices:
                whole.add(choice.model_dump(exclude_unset=True))
    if whole.finish_reason is None:
        raise RolloutFailed("a stream ended before its reply")
    return whole.message, whole.finish_reason


async def _call(tools: Mapping[str, Tool], name: str, arguments: str) -> str:
    if name not in tools:
        return f"error: no tool {name!r}; there are {', '.join(sorted(tools)) or 'none'}"
    return await tools[name].call(arguments)

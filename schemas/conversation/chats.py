"""Convert the recorded request and reply of a step to chat messages. Pure.

The result has the shape of Chat Completions: roles system, user, assistant and tool; tool calls in
`tool_calls`, their results in messages of role tool with `tool_call_id`. A Chat Completions request
stays as it is. No shape is trusted: unexpected content is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from clawstream.schemas.conversation.items import (
    calls_of,
    is_said,
    reasoning_of,
    result_of,
    texts_of,
)
from clawstream.schemas.conversation.openai_chat import OPENAI_CHAT
from clawstream.schemas.conversation.parsing import loaded
from clawstream.schemas.conversation.protocol import ToolResult, objects_in
from clawstream.schemas.conversation.protocols import SYSTEM_FIELDS, TOOL_SCHEMAS
from clawstream.schemas.conversation.replies import items_of
from clawstream.schemas.conversation.requests import history_of

Message = dict[str, Any]
_ROLES = {"developer": "system"}


class Chat(NamedTuple):
    """A request and its reply as chat messages; the reply is the last message.

    tools: definitions as in Chat Completions; empty without tools.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]


def chat_of(
    protocol: str, request_json: bytes, response_json: bytes, is_whole: bool = False
) -> Chat | None:
    """Return the messages of a step and its tools; None if it is no chat, or nested too deeply.

    Args:
        protocol: one of `PROTOCOLS`.
        request_json: the client's request body.
        response_json: the reply's message, in the shape of the protocol.
        is_whole: for readers: also reasoning, as `reasoning_content`, and images of tool results.
    """
    try:
        request, reply = loaded(request_json), loaded(response_json)
        if not isinstance(request, dict) or not isinstance(reply, dict):
            return None
        return _chat(protocol, request, reply, is_whole)
    except (ValueError, RecursionError):
        return None


def _chat(protocol: str, request: Message, reply: Message, is_whole: bool) -> Chat | None:
    if protocol == OPENAI_CHAT.name:
        messages = objects_in(request.get("messages"))
        tools = objects_in(request.get("tools"))
        if is_whole:
            messages = [message | _thoughts([message]) for message in messages]
        answer = {**reply, **(_thoughts([reply]) if is_whole else {}), "role": "assistant"}
    else:
        messages = list(_messages(request, is_whole))
        definitions = map(_tool, objects_in(request.get("tools")))
        tools = [tool for tool in definitions if tool is not None]
        answer = _assistant(items_of(reply), is_whole)
    if not messages:
        return None
    return Chat((*messages, answer), tuple(tools))


def _messages(request: Mapping[str, Any], is_whole: bool) -> Iterator[Message]:
    """Yield the messages of a request of any other protocol."""
    system = next((request[field] for field in SYSTEM_FIELDS if field in request), None)
    if text := _plain(system):
        yield {"role": "system", "content": text}
    history = history_of(request)
    if history is None and isinstance(prompt := request.get("prompt"), str):
        history = [{"role": "user", "content": prompt}]
    model_turn: list[Message] = []
    for item in objects_in(history):
        is_thought = is_whole and item.get("type") == "reasoning"
        if is_thought or is_said(item):
            model_turn.append(item)
            continue
        messages = list(_environment(item, is_whole))
        if model_turn and messages:
            yield _assistant(model_turn, is_whole)
            model_turn = []
        yield from messages
    if model_turn:
        yield _assistant(model_turn, is_whole)


def _environment(item: Message, is_whole: bool) -> Iterator[Message]:
    """Yield the messages of an item that the policy did not write."""
    if (result := result_of(item)) is not None:
        yield _tool_message(result, is_whole)
        return
    if not isinstance(item.get("role"), str):
        return  # reasoning and references have no text of their own
    content = item.get("content")
    others: list[Any] = []
    for block in content if isinstance(content, list) else ():
        if (result := result_of(block)) is not None:
            yield _tool_message(result, is_whole)
        else:
            others.append(block)
    if not isinstance(content, list) or others:
        role = _ROLES.get(item["role"], item["role"])
        kept: Any = content if isinstance(content, str) else _parts(others)
        yield {"role": role, "content": kept}


def _parts(blocks: Iterable[Any]) -> str | list[Any]:
    """Return text blocks as one text; with other blocks among them, such as images, all blocks."""
    texts: list[str] = []
    whole = list(blocks)
    for block in whole:
        text = block.get("text") if isinstance(block, dict) else block
        if not isinstance(text, str):
            return whole
        texts.append(text)
    return "".join(texts)


def _tool_message(result: ToolResult, is_whole: bool) -> Message:
    content = result.content
    kept = _parts(content) if is_whole and isinstance(content, list) else _plain(content)
    return {"role": "tool", "tool_call_id": result.call_id, "content": kept}


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = _parts(content) if isinstance(content, list) else content
    if parts is None:
        return ""
    return parts if isinstance(parts, str) else json.dumps(parts, ensure_ascii=False)


def _thoughts(items: Iterable[Message]) -> Message:
    """Return the reasoning of a model turn as a field of its message; empty without any."""
    text = "\n\n".join(text for item in items for text in reasoning_of(item))
    return {"reasoning_content": text} if text else {}


def _assistant(items: Iterable[Message], is_whole: bool) -> Message:
    """Return one message for all items of a model turn."""
    items = list(items)
    message: Message = {
        "role": "assistant",
        "content": "".join(text for item in items for text in texts_of(item)),
        **(_thoughts(items) if is_whole else {}),
    }
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": _arguments(call.given)},
        }
        for item in items
        for call in calls_of(item)
    ]
    return {**message, "tool_calls": calls} if calls else message


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


def _tool(tool: Message) -> Message | None:
    """Return a tool's definition in the shape of Chat Completions; None for a tool of the server,
    which has no parameters.
    """
    parameters = next((tool[field] for field in TOOL_SCHEMAS if field in tool), None)
    if not isinstance(tool.get("name"), str) or not isinstance(parameters, dict):
        return None
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}

"""Convert the recorded request and reply of a step to chat messages. Pure.

The result has the shape of Chat Completions: roles system, user, assistant and tool; tool calls in
`tool_calls`, their results in messages of role tool with `tool_call_id`. A Chat Completions request
stays as it is. No shape is trusted: unexpected content is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clawstream.export.row import Chat
from clawstream.schemas.conversation import calls_of, items_of, loaded, reasoning_of, texts_of

Message = dict[str, Any]
_ROLES = {"developer": "system"}


def chat_of(
    protocol: str, request_json: bytes, response_json: bytes, is_whole: bool = False
) -> Chat | None:
    """Return the messages of a step and its tools; None if it is no chat.

    Args:
        protocol: `openai.chat`, `openai.responses`, `openai.completions` or `anthropic.messages`.
        request_json: the client's request body.
        response_json: the reply's message, in the shape of the protocol.
        is_whole: for readers: also reasoning, as `reasoning_content`, and images of tool results.
    """
    try:
        request, reply = loaded(request_json), loaded(response_json)
    except ValueError:
        return None
    if not isinstance(request, dict) or not isinstance(reply, dict):
        return None
    if protocol == "openai.chat":
        messages, tools = _dicts(request.get("messages")), _dicts(request.get("tools"))
        if is_whole:
            messages = [m | _thought([m]) for m in messages]
        answer = {**reply, **(_thought([reply]) if is_whole else {}), "role": "assistant"}
    else:
        messages = list(_messages(request, is_whole))
        tools = [tool for t in _dicts(request.get("tools")) if (tool := _tool(t)) is not None]
        answer = _assistant(items_of(reply), is_whole)
    if not messages:
        return None
    return Chat((*messages, answer), tuple(tools))


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message; its text parts are joined without a separator.

    A lone surrogate, which JSON can have and UTF-8 can't, becomes a question mark.
    """
    return "".join(texts_of(message)).encode("utf-8", "replace").decode()


def _dicts(value: Any) -> list[Message]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _messages(request: Mapping[str, Any], is_whole: bool) -> Iterator[Message]:
    """Yield the messages of a request of Messages, Responses or Completions."""
    system = request.get("system", request.get("instructions"))
    if text := _plain(system):
        yield {"role": "system", "content": text}
    given = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    model_turn: list[Message] = []
    for item in _dicts(given):
        is_thought = is_whole and item.get("type") == "reasoning"
        if item.get("role") == "assistant" or is_thought or any(calls_of(item)):
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
    kind = item.get("type")
    if isinstance(kind, str) and kind.endswith("_call_output"):
        yield _result(item.get("call_id"), item.get("output"), is_whole)
        return
    if not isinstance(item.get("role"), str):
        return  # reasoning and references have no text of their own
    content = item.get("content")
    others: list[Any] = []
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and block.get("type") == "tool_result":
            yield _result(block.get("tool_use_id"), block.get("content"), is_whole)
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


def _result(call_id: Any, content: Any, is_whole: bool) -> Message:
    kept = _parts(content) if is_whole and isinstance(content, list) else _plain(content)
    return {"role": "tool", "tool_call_id": call_id, "content": kept}


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = _parts(content) if isinstance(content, list) else content
    if parts is None:
        return ""
    return parts if isinstance(parts, str) else json.dumps(parts, ensure_ascii=False)


def _thought(items: Iterable[Message]) -> Message:
    """Return the reasoning of a model turn as a field of its message; empty without any."""
    text = "\n\n".join(text for item in items for text in reasoning_of(item))
    return {"reasoning_content": text} if text else {}


def _assistant(items: Iterable[Message], is_whole: bool) -> Message:
    """Return one message for all items of a model turn."""
    items = list(items)
    message: Message = {
        "role": "assistant",
        "content": "".join(text for item in items for text in texts_of(item)),
        **(_thought(items) if is_whole else {}),
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
    parameters = tool.get("input_schema", tool.get("parameters"))
    if not isinstance(tool.get("name"), str) or not isinstance(parameters, dict):
        return None
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}

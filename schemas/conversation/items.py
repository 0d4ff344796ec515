"""Extract texts and tool calls from recorded replies and from assistant turns in requests. Pure.

Supports Chat Completions, Completions, Messages and Responses. No shape is trusted: unexpected
content counts as absent. Reward functions, quality rules and assembly use this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import orjson

TEXT_BLOCKS = ("text", "output_text", "refusal")
CALL_ITEMS = (
    *("function_call", "custom_tool_call", "local_shell_call", "shell_call"),
    *("apply_patch_call", "computer_call"),
)
"""Items of Responses that the client has to answer. The server has already answered other calls."""
SERVER_ITEMS = ("reasoning", "item_reference", "mcp_list_tools", "mcp_approval_request")
"""Items of Responses that are neither messages nor calls, and that a client only sends back."""
AUXILIARY_TAGS = frozenset({"sub_agent", "title", "summary", "compaction"})
"""Tags of an agent's auxiliary calls; their replies are not the agent's answer."""
_TAG = "(?:think|thinking|thought|reasoning)"
_THOUGHT_TAG = re.compile(f"</?{_TAG}>")
_THOUGHT = re.compile(
    rf"\A(?:(?!<{_TAG}>).)*?</{_TAG}>|<(?P<tag>{_TAG})>(?:.*?</(?P=tag)>|.*)", re.DOTALL
)
"""A thought that the prompt has opened, or one in tags, closed or not."""
_ARGUMENTS = ("arguments", "input", "action", "operation")


class Call(NamedTuple):
    """One tool call.

    given: Arguments, a JSON value or JSON as text, depending on the protocol; None without
    arguments. is_json: Whether `given` must be a JSON object; otherwise it is free text or a
    tool-specific shape.
    """

    call_id: str | None
    name: str | None
    given: Any
    is_json: bool


def loaded(packed: bytes | str) -> Any:
    """Parse JSON.

    orjson rejects escaped lone surrogates, which are valid JSON; the standard library accepts them.

    Raises:
        ValueError: The text is no JSON.
    """
    try:
        return orjson.loads(packed)
    except orjson.JSONDecodeError as first:
        try:
            return json.loads(packed, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise first from None


def _refuse(constant: str) -> NoReturn:
    """Refuse NaN and Infinity: they are Python's, not JSON's."""
    raise ValueError(constant)


def is_model_item(item: Any) -> bool:
    """Return whether the model's side produced a message or item of a request."""
    return isinstance(item, dict) and (
        item.get("role") == "assistant"
        or (kind := str(item.get("type"))) in SERVER_ITEMS
        or kind.endswith("_call")
    )


def items_of(reply: Any) -> list[dict[str, Any]]:
    """List the messages and items of a reply: the output of Responses, else one message."""
    if not isinstance(reply, dict):
        return []
    output = reply.get("output")
    if isinstance(output, list):
        return [item for item in output if isinstance(item, dict)]
    if "content" not in reply and isinstance(reply.get("text"), str):  # of completions
        return [{"content": reply["text"]}]
    return [reply]


def texts_of(item: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the model said in words in one message or item; reasoning is left out."""
    content = item.get("content")
    if isinstance(content, str):
        if content:
            yield content
    elif isinstance(content, list):
        for block in content:
            text = block
            if isinstance(block, dict):
                text = (
                    block.get("text", block.get("refusal"))
                    if block.get("type") in TEXT_BLOCKS
                    else None
                )
            if isinstance(text, str) and text:
                yield text
    refusal = item.get("refusal")
    if isinstance(refusal, str) and refusal:
        yield refusal


def reasoning_of(item: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the model thought in words in one message or item; encrypted thoughts as a note.

    Chat Completions of vLLM, SGLang and DeepSeek have `reasoning` or `reasoning_content`, Messages
    blocks `thinking` and `redacted_thinking`, Responses items `reasoning`.
    """
    content = item.get("content")
    blocks = [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []
    found = [item.get("reasoning_content") or item.get("reasoning")]
    if item.get("type") == "reasoning":
        summary = item.get("summary")
        parts = [p for p in summary if isinstance(p, dict)] if isinstance(summary, list) else []
        found += [part.get("text") for part in (*parts, *blocks)]
        if item.get("encrypted_content") and not any(found):
            found.append("(encrypted)")
    for block in blocks:
        if block.get("type") in ("thinking", "reasoning"):
            found.append(block.get("thinking") or block.get("text"))
        elif block.get("type") == "redacted_thinking":
            found.append("(encrypted)")
    yield from (text for text in found if isinstance(text, str) and text)


def calls_of(item: Mapping[str, Any]) -> Iterator[Call]:
    """Yield the tool calls of one message or item, in order.

    Unknown shapes are a `Call` of None.
    """
    kind = item.get("type")
    if kind in CALL_ITEMS:
        yield _call(item.get("call_id") or item.get("id"), item, kind == "function_call")
        return
    made, content = item.get("tool_calls"), item.get("content")
    for call in made if isinstance(made, list) else ():
        if not isinstance(call, dict):
            yield Call(None, None, None, True)
            continue
        custom = call.get("type") == "custom"
        inner = call.get("custom" if custom else "function")
        yield _call(call.get("id"), inner if isinstance(inner, dict) else {}, not custom)
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and block.get("type") == "tool_use":
            yield _call(block.get("id"), block, True)
    old = item.get("function_call")
    if isinstance(old, dict):  # what chat completions had before tools
        yield _call(None, old, True)
    elif old:
        yield Call(None, None, None, True)


def _call(call_id: Any, made: Mapping[str, Any], is_json: bool) -> Call:
    given = next((made[name] for name in _ARGUMENTS if name in made), None)
    name = made.get("name")
    return Call(
        call_id if isinstance(call_id, str) else None,
        name if isinstance(name, str) else None,
        given,
        is_json,
    )


def texts_in(reply: Any) -> Iterator[str]:
    """Yield everything that the model said in words in a reply."""
    for item in items_of(reply):
        yield from texts_of(item)


def calls_in(reply: Any) -> Iterator[Call]:
    """Yield every tool call of a reply."""
    for item in items_of(reply):
        yield from calls_of(item)


def without_thoughts(text: str) -> str:
    """Return the words of a reply without its thoughts in tags such as <think>.

    A thought that is not closed ends with the text; one that the prompt has opened begins with it.
    """
    return _THOUGHT.sub("", text) if _THOUGHT_TAG.search(text) else text


def answer_in(reply: Any) -> str | None:
    """Return the text of the last message of a reply that has one; None when no message has.

    The blocks of one message are joined without a separator, as the providers' SDKs do.
    """
    for item in reversed(items_of(reply)):
        if text := "".join(texts_of(item)):
            return text
    return None

"""OpenAI Chat Completions: calls and reasoning are fields of a message. Pure."""

from __future__ import annotations

from clawstream.schemas.conversation.protocol import (
    UNREADABLE_CALL,
    Call,
    Item,
    Protocol,
    call_of,
    texts_among,
)


def calls(message: Item) -> list[Call]:
    """Return the calls in `tool_calls`, and in what chat completions had before tools."""
    listed, single = message.get("tool_calls"), message.get("function_call")
    if listed is None and single is None:
        return []  # as a rule
    found = [_call(call) for call in listed] if isinstance(listed, list) else []
    if isinstance(single, dict):
        found.append(call_of(None, single, True))
    elif single:
        found.append(UNREADABLE_CALL)
    return found


def _call(call: object) -> Call:
    if not isinstance(call, dict):
        return UNREADABLE_CALL
    is_custom = call.get("type") == "custom"
    inner = call.get("custom" if is_custom else "function")
    return call_of(call.get("id"), inner if isinstance(inner, dict) else {}, not is_custom)


def thoughts(message: Item) -> list[str]:
    """Return the reasoning that vLLM, SGLang and DeepSeek add to a message."""
    return texts_among([message.get("reasoning_content") or message.get("reasoning")])


def image(block: Item) -> str | None:
    """Return the URL in a block `image_url`. vLLM takes one without a type, too."""
    match block:
        case {"image_url": {"url": str(url)}}:
            return url
    return None


OPENAI_CHAT = Protocol(
    name="openai.chat",
    history="messages",
    prompt=(
        *("tools", "functions", "tool_choice", "response_format", "documents", "chat_template"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
        "reasoning_effort",
    ),
    said=("text", "refusal"),
    asked=("text",),
    calls=calls,
    thoughts=thoughts,
    image=image,
)

"""OpenAI Responses: calls, their results and reasoning are items beside the messages. Pure."""

from __future__ import annotations

from clawstream.schemas.conversation.protocol import (
    ENCRYPTED,
    Call,
    Item,
    Protocol,
    ToolResult,
    call_of,
    objects_in,
    texts_among,
)

CALL_ITEMS = (
    *("function_call", "custom_tool_call", "local_shell_call", "shell_call"),
    *("apply_patch_call", "computer_call"),
)
"""Items that the client has to answer. The server has already answered other calls."""


def calls(item: Item) -> list[Call]:
    """Return the call that an item is."""
    kind = item.get("type")
    if kind not in CALL_ITEMS:
        return []
    return [call_of(item.get("call_id") or item.get("id"), item, kind == "function_call")]


def thoughts(item: Item) -> list[str]:
    """Return the texts of an item `reasoning`; an encrypted one as a note."""
    if item.get("type") != "reasoning":
        return []
    blocks = [*objects_in(item.get("summary")), *objects_in(item.get("content"))]
    texts = [block.get("text") for block in blocks]
    if item.get("encrypted_content") and not any(texts):
        texts.append(ENCRYPTED)
    return texts_among(texts)


def result(item: Item) -> ToolResult | None:
    """Return the result that an item such as `function_call_output` is."""
    kind = item.get("type")
    if isinstance(kind, str) and kind.endswith("_call_output"):
        return ToolResult(item.get("call_id"), item.get("output"))
    return None


def image(block: Item) -> str | None:
    """Return the URL in a block `input_image`."""
    match block:
        case {"image_url": str(url)}:
            return url
    return None


OPENAI_RESPONSES = Protocol(
    name="openai.responses",
    history="input",
    system="instructions",
    prompt=("tools", "tool_choice", "text", "reasoning", "previous_response_id", "conversation"),
    said=("output_text", "refusal"),
    asked=("input_text", "output_text"),
    server_items=("reasoning", "item_reference", "mcp_list_tools", "mcp_approval_request"),
    tool_schema="parameters",
    output="output",
    calls=calls,
    thoughts=thoughts,
    result=result,
    image=image,
)

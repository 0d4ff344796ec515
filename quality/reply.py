"""What is in a recorded reply: its texts and its calls of tools, in whatever protocol. Nothing trusts a shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TEXT_BLOCKS = ("text", "output_text", "refusal")


def items_of(reply: Any) -> list[dict[str, Any]]:
    """The messages and items of a reply: of chat, completions and Messages one message, of Responses its output."""
    if not isinstance(reply, dict):
        return []
    output = reply.get("output")
    return [i for i in output if isinstance(i, dict)] if isinstance(output, list) else [reply]


def texts_in(reply: Any) -> Iterator[str]:
    """Everything that the model said in words."""
    for item in items_of(reply):
        content = item.get("content", item.get("text"))
        for block in content if isinstance(content, list) else [content]:
            said = block
            if isinstance(block, dict):
                said = block.get("text", block.get("refusal")) if block.get("type") in TEXT_BLOCKS else None
            if isinstance(said, str) and said:
                yield said


def calls_in(reply: Any) -> Iterator[tuple[str, Any]]:
    """Name and arguments of every call of a tool: JSON as text where the protocol has it so, else the value; None when there are none.

    What a custom tool takes is free text: its arguments are {}.
    """
    for item in items_of(reply):
        kind, made, content = item.get("type"), item.get("tool_calls"), item.get("content")
        if kind == "custom_tool_call":
            yield str(item.get("name")), {}
        elif kind == "function_call":
            yield str(item.get("name")), item.get("arguments")
        elif item.get("function_call"):  # before there were tools
            yield _function(item["function_call"])
        for call in made if isinstance(made, list) else ():
            if isinstance(call, dict) and call.get("type") == "custom":
                yield "a custom tool", {}
            else:
                yield _function(call.get("function") if isinstance(call, dict) else None)
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type") == "tool_use":
                yield str(block.get("name")), block.get("input")


def _function(called: Any) -> tuple[str, Any]:
    return (str(called.get("name")), called.get("arguments")) if isinstance(called, dict) else ("no function", None)

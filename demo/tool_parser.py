"""vLLM tool-parser plugin `strict_tags`: a reply is a tool call only if the chat template renders
it to the same bytes.

Load it with `--tool-parser-plugin demo/tool_parser.py --tool-call-parser strict_tags`. vLLM's own
parser for these tags is lenient: it accepts a call without its closing tag and drops text after it.
The reward does not punish either, so a policy learns to write such calls, and then the prompt of
turn 2 no longer starts with the tokens of turn 1. Here such a reply is content.

A streamed reply gives the same result: content is sent until a tag opens; the rest is sent when the
reply ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers import ToolParser, ToolParserManager

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


def strict_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a complete reply into content and calls (name, arguments as JSON text).

    No calls unless all of it renders back exactly.
    """
    content, opened, _ = text.partition(OPEN)
    # vLLM turns blank content before a call into none, which would not render back.
    if not opened or (content and not content.strip()):
        return text, []
    calls: list[tuple[str, str]] = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
        except ValueError:
            return text, []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, []
        if not isinstance(call.get("arguments"), dict):
            return text, []
        calls.append((call["name"], json.dumps(call["arguments"], ensure_ascii=False)))
    again = content + "".join(
        f'{OPEN}{{"name": "{name}", "arguments": {args}}}{CLOSE}' for name, args in calls
    )
    return (content, calls) if again == text else (text, [])


@ToolParserManager.register_module(["strict_tags"])
class StrictTags(ToolParser):  # type: ignore[misc]
    """Parser of one choice of a reply.

    vLLM calls either `extract_tool_calls` once, or `extract_tool_calls_streaming` for each delta
    and then `finish_streaming`.
    """

    # Forced tool choices go through this parser too: it knows the model's only format.
    supports_required_and_named = False
    # vLLM then passes deltas alone and calls finish_streaming at the end of the reply.
    engine_based_streaming = True

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        super().__init__(tokenizer, tools)
        self._sent = ""
        self._held = ""

    def adjust_request(self, request: Any) -> Any:
        """Keep special tokens in the text: a dropped token could not be rendered back."""
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Parse a complete reply."""
        content, calls = strict_calls(model_output) if _may_call(request) else (model_output, [])
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[
                ToolCall(type="function", function=FunctionCall(name=n, arguments=a))
                for n, a in calls
            ],
            content=content or None,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        """Return the content of a delta up to a tag, or a possible start of one."""
        if not _may_call(request):
            return DeltaMessage(content=delta_text) if delta_text else None
        self._held += delta_text
        at = self._held.find(OPEN)
        if at < 0:
            at = len(self._held) - _opening(self._held)
        now, self._held = self._held[:at], self._held[at:]
        self._sent += now
        return DeltaMessage(content=now) if now else None

    def finish_streaming(self) -> Any:
        """Return the text that was held back, as calls or as content."""
        _, calls = strict_calls(self._sent + self._held)
        held, self._held = self._held, ""
        if not calls:
            return DeltaMessage(content=held) if held else None
        return DeltaMessage(
            tool_calls=[
                DeltaToolCall(
                    index=i,
                    id=make_tool_call_id(),
                    type="function",
                    function=DeltaFunctionCall(name=name, arguments=arguments),
                )
                for i, (name, arguments) in enumerate(calls)
            ]
        )


def _may_call(request: Any) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


def _opening(text: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of the opening tag."""
    return next(
        (n for n in range(min(len(text), len(OPEN) - 1), 0, -1) if OPEN.startswith(text[-n:])), 0
    )

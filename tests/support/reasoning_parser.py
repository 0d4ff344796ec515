"""vLLM reasoning-parser plugin `think_tags` for tests.

A reply that begins with <think> reasons up to </think>; any other reply does not.

vLLM's own parsers for these tags treat every reply as reasoning up to the closing tag, so a model
that uses them must always reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module(["think_tags"])
class ThinkTags(BaseThinkingReasoningParser):  # type: ignore[misc]
    """Parse replies in which reasoning is optional; the base class assumes that it is always there.

    The base class parses the tags of a stream.
    """

    start_token, end_token = "<think>", "</think>"

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """Return whether the reasoning has ended. input_ids: of the reply so far."""
        return input_ids[0] != self.start_token_id or self.end_token_id in delta_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Return the reasoning and the content of a whole reply."""
        if not model_output.startswith(self.start_token):
            return None, model_output
        reasoning, _, content = model_output.removeprefix(self.start_token).partition(
            self.end_token
        )
        return reasoning, content or None

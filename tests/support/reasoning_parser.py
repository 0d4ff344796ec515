"""vLLM reasoning-parser plugin `think_tags` for tests: a reply that begins with <think> reasons up to </think>, any other does not.

vLLM's own parsers for these tags take every reply for reasoning until the closing tag comes, so a model that uses them has to reason always.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser


@ReasoningParserManager.register_module(["think_tags"])
class ThinkTags(BaseThinkingReasoningParser):  # type: ignore[misc]
    """The base class reads the tags of a stream; here is what it takes for granted."""

    start_token, end_token = "<think>", "</think>"

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """input_ids: of the reply so far."""
        return input_ids[0] != self.start_token_id or self.end_token_id in delta_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """A whole reply."""
        if not model_output.startswith(self.start_token):
            return None, model_output
        reasoning, _, content = model_output.removeprefix(self.start_token).partition(
            self.end_token
        )
        return reasoning, content or None

"""Adapter of OpenAI text completions. Pure.

A call has `n` choices for each prompt. The adapter does not request tokens together with `echo`:
vLLM then omits the prompt from the echoed text, which would change the client's reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clawstream.gateway.errors import BadRequest
from clawstream.gateway.protocols.base import Choice, EngineKind, Request
from clawstream.gateway.protocols.openai_choices import ChoiceBuffer, ChoiceDelta, ChoicesAdapter
from clawstream.gateway.protocols.reply_fields import (
    array,
    array_or_none,
    choice_index,
    dumps,
    mapping,
    text_or_none,
)
from clawstream.gateway.protocols.request_fields import MAX_CHOICES, n_of

ECHOED = "vLLM without our middleware cannot report token ids with an echoed prompt"
NOTHING_SAMPLED = "the call requests only the echo of the prompt (max_tokens 0)"


class OpenAICompletions(ChoicesAdapter):
    """Adapter of `POST /v1/completions`."""

    name = "openai.completions"
    path = "/v1/completions"
    reply_noun = "a completion"
    has_turns = False

    def token_fields(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if payload.get("echo"):
            return {}
        added: dict[str, Any] = {}
        if not payload.get("return_token_ids"):
            added["return_token_ids"] = True
        # Without logprobs this one is invalid, and the client must get the engine's error.
        if payload.get("logprobs") is None and not payload.get("logprob_token_ids"):
            added["logprobs"] = 0  # the sampled token alone
        return added

    def buffer(self) -> _ChoiceBuffer:
        return _ChoiceBuffer()

    def delta(
        self, choice: Any, choices: list[Any], asked: Mapping[str, Any], kind: EngineKind
    ) -> ChoiceDelta:
        # Some last chunks have no text.
        index, text = choice_index(choice, choices), text_or_none(choice.get("text")) or ""
        finish = text_or_none(choice.get("finish_reason"))
        if kind != "vllm":
            return ChoiceDelta(index, text, finish)
        prompt_ids = array_or_none(choice.get("prompt_token_ids"))
        ids, reported = array_or_none(choice.get("token_ids")), choice.get("logprobs")
        logprobs = None
        if reported is not None:
            logprobs = array_or_none(mapping(reported).get("token_logprobs"))
        if logprobs is not None and ids is not None and asked.get("echo"):
            logprobs = logprobs[max(0, len(logprobs) - len(ids)) :]  # the prompt's come first
        return ChoiceDelta(index, text, finish, prompt_ids, ids, logprobs)

    def has_content(self, content: str) -> bool:
        return bool(content)

    def tokens_absent(self, asked: Mapping[str, Any], kind: EngineKind) -> str | None:
        if not asked.get("echo"):
            return None
        if asked.get("max_tokens") == 0:  # vLLM samples a token and drops it
            return NOTHING_SAMPLED
        return ECHOED if kind == "vllm" and not asked.get("return_token_ids") else None

    def _check(self, payload: dict[str, Any]) -> tuple[int, int]:
        prompts, each = prompt_count(payload), n_of(payload)
        if prompts * each > MAX_CHOICES:
            raise BadRequest(
                f"prompt: {prompts} prompts with n={each} are more than {MAX_CHOICES} choices",
                "prompt",
            )
        return prompts * each, prompts

    def _choices(
        self, payload: dict[str, Any], request: Request, kind: EngineKind
    ) -> tuple[Choice, ...]:
        made = []
        for choice in array(payload["choices"]):
            delta = self.delta(choice, payload["choices"], request.payload, kind)
            buffer = self.buffer()
            buffer.add(delta.content)
            buffer.add_tokens(delta)
            buffer.finish_reason = delta.finish_reason or None
            made.append(self.choice(delta.choice, buffer, request, kind))
        return tuple(made)


def prompt_count(payload: Mapping[str, Any]) -> int:
    """Return the number of prompts: a text, a list of texts, token ids, or lists of token ids.

    Checks only the first entry of a list: a prompt may have 100,000 ids, and the engine refuses a
    mixed list.

    Raises:
        BadRequest: The prompt has another type.
    """
    prompt, embeddings = payload.get("prompt"), payload.get("prompt_embeds")
    if isinstance(prompt, list):
        first = prompt[0] if prompt else None
        if prompt and not isinstance(first, str | list | int):
            raise BadRequest(
                "prompt: a list must hold strings, token ids or lists of token ids", "prompt"
            )
        prompts = 1 if isinstance(first, int) else len(prompt)
    elif prompt is None or isinstance(prompt, str):
        prompts = int(prompt is not None or embeddings is None)
    else:
        raise BadRequest("prompt: must be a string, a list of strings, or token ids", "prompt")
    # The engine refuses an empty list.
    return max(
        1,
        prompts
        + (len(embeddings) if isinstance(embeddings, list) else int(embeddings is not None)),
    )


class _ChoiceBuffer(ChoiceBuffer):
    """Buffer of one choice."""

    __slots__ = ("texts",)

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def add(self, content: str) -> None:
        self.texts.append(content)

    def message(self) -> bytes:
        return dumps({"text": "".join(self.texts)})

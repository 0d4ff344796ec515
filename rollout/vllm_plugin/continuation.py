"""Exact continuation inside vLLM's API server: a prompt that keeps the token ids of earlier turns.

All chat endpoints (chat completions, Messages, Responses) call one method of the engine's renderer,
`render_chat_async`. `PromptTap` replaces it. It renders as always, then replaces the ids by those
that the request gave, followed by the tokens of the new turn. The endpoint computes everything else
from the new prompt: the length check, the default of `max_tokens`, whether reasoning has
ended (structured outputs), and the usage.

`renderers` makes the tokens of the new turn. They must equal the end of the rendered prompt, which
the model's own template made. So a wrong family is found at the first call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from clawstream.schemas.engine_frames import Prior
from clawstream.schemas.tokens import unpack_ids

_LOG = logging.getLogger(__name__)
MEDIA = "media"
NO_BRIDGE = "no_bridge"
TOKENIZER_CHANGED = "tokenizer_changed"
TOO_LONG = "too_long"
UNKNOWN_TEMPLATE = "unknown_template"
MAX_RENDERERS = 64
SEARCHED = 1024
"""Last ids of the earlier prompt in which `renderers` looks for the beginning of the reply."""
FAILURES = (
    ImportError, AssertionError, ValueError, TypeError, LookupError, AttributeError, RuntimeError,
)  # fmt: skip
"""Exceptions of `renderers` for a family, tokenizer or message that it does not know."""


class Rendered(NamedTuple):
    """A prompt that vLLM rendered.

    conversation: Messages, in the form in which the template got them.
    ids: None: it is not a prompt of tokens alone.
    max_tokens: Of prompt and reply; None: no limit.
    reply_tokens: That the request asks for; 0: not said.
    """

    conversation: Sequence[Mapping[str, Any]]
    ids: Sequence[int] | None
    tools: Any = None
    max_tokens: int | None = None
    reply_tokens: int = 0


def continued(prior: Prior, rendered: Rendered, renderer: Any) -> list[int] | str:
    """Return the prompt that keeps the ids of `prior`, or why there is none.

    Args:
        prior: Tokens of the earlier turn.
        rendered: The prompt without them.
        renderer: A Renderer of the library `renderers`.
    """
    if rendered.ids is None:
        return MEDIA
    prompt, sampled = unpack_ids(prior.prompt_ids), unpack_ids(prior.sampled_ids)
    new = new_turn(rendered.conversation)
    end = prompt[-SEARCHED:]
    try:
        bridged = renderer.bridge_to_next_turn(end, sampled, new, tools=rendered.tools)
    except FAILURES as error:
        _LOG.warning("renderers can't add the new messages: %r", error)
        return NO_BRIDGE
    kept = len(end) + len(sampled)
    if bridged is None or list(bridged.token_ids[:kept]) != [*end, *sampled]:
        return NO_BRIDGE
    added = list(bridged.token_ids[kept:])
    turn = _without_close(added, sampled, renderer.get_stop_token_ids())
    if not turn or list(rendered.ids[-len(turn) :]) != turn:
        return UNKNOWN_TEMPLATE
    ids = [*prompt, *sampled, *added]
    return ids if _fits(len(ids), prior.limit, rendered) else TOO_LONG


def new_turn(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages after the last one of the model."""
    at = len(conversation)
    while at and conversation[at - 1].get("role") != "assistant":
        at -= 1
    return list(conversation[at:])


def _without_close(added: list[int], sampled: Sequence[int], stops: Sequence[int]) -> list[int]:
    """Remove the tokens that close a turn which was cut: the template closed another text."""
    if sampled and sampled[-1] in stops:
        return added
    return added[next((at + 1 for at, token in enumerate(added) if token in stops), 0) :]


def _fits(length: int, limit: int | None, rendered: Rendered) -> bool:
    """Return whether the reply has the room that it asks for, if the rendered prompt leaves it."""
    if limit is not None and length > limit:
        return False
    if rendered.max_tokens is None or rendered.ids is None:
        return True
    asked = max(1, rendered.reply_tokens)
    needed = asked if len(rendered.ids) + asked <= rendered.max_tokens else 1
    return length + needed <= rendered.max_tokens


class PromptTap:
    """Wraps vLLM's renderer.

    current: Returns the `PriorTokens` of the current request, if any.
    fingerprint: Of the engine's tokenizer.
    """

    def __init__(
        self, renderer: Any, current: Callable[[], PriorTokens | None], fingerprint: str | None
    ) -> None:
        self._tokenizer, self._current = renderer.tokenizer, current
        self._fingerprint = fingerprint
        self._render = renderer.render_chat_async
        renderer.render_chat_async = self.render_chat_async
        self._renderer_of = lru_cache(MAX_RENDERERS)(self._make_renderer)

    async def render_chat_async(
        self, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        """Render, and replace the prompt if the request continues an earlier turn."""
        result = await self._render(conversations, chat_params, tok_params, **more)
        given = self._current()
        if given is None or given.prior is None:
            return result
        prior, given.prior = given.prior, None  # a later generation renders as always
        made, prompts = result
        if len(prompts) != 1:
            given.reason = NO_BRIDGE
            return result
        found = self._replacement(prior, made[0], prompts[0], chat_params, tok_params)
        if isinstance(found, str):
            given.reason = found
            return result
        kept = {k: v for k, v in prompts[0].items() if k not in ("prompt", "prompt_token_offsets")}
        return made, [{**kept, "prompt_token_ids": found}]

    def _replacement(
        self, prior: Prior, conversation: Any, prompt: Any, chat_params: Any, tok_params: Any
    ) -> list[int] | str:
        if prior.tokenizer not in (None, self._fingerprint):
            return TOKENIZER_CHANGED
        truncated = getattr(tok_params, "truncate_prompt_tokens", None)
        limits = [n for n in (prior.limit, truncated) if n is not None and n > 0]
        prior = prior._replace(limit=min(limits, default=None))
        options = chat_params.chat_template_kwargs
        rendered = Rendered(
            conversation,
            prompt["prompt_token_ids"] if prompt["type"] == "token" else None,
            options.get("tools"),
            getattr(tok_params, "max_total_tokens", None),
            getattr(tok_params, "max_output_tokens", None) or 0,
        )
        scalars = {k: v for k, v in options.items() if isinstance(v, bool | int | str)}
        renderer = self._renderer_of(prior.renderer, frozenset(scalars.items()))
        return UNKNOWN_TEMPLATE if renderer is None else continued(prior, rendered, renderer)

    def _make_renderer(self, name: str, options: frozenset[tuple[str, Any]]) -> Any:
        try:
            return renderer_of(self._tokenizer, name, dict(options))
        except FAILURES as error:
            _LOG.warning("no renderer %r for this tokenizer: %r", name, error)
            return None


class PriorTokens:
    """What one request gives for its prompt, and why it was not used.

    prior: None once it was used, or if the request gives nothing.
    """

    prior: Prior | None = None
    reason: str | None = None


def renderer_of(tokenizer: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return a Renderer that keeps the reasoning of earlier turns.

    Args:
        tokenizer: Of the engine.
        name: Family of the chat template.
        options: Arguments of the template; those that the family does not know are ignored.

    Raises:
        ImportError: The library `renderers` is not installed.
        FAILURES: There is no such family, or the tokenizer is not of it.
    """
    from renderers import (
        config_from_name,
        create_renderer,
        merge_chat_template_kwargs,
        template_field_names,
    )

    config = config_from_name(name).model_copy(update={"thinking_retention": "all"})
    known = template_field_names(config)
    given = {key: value for key, value in options.items() if key in known}
    return create_renderer(tokenizer, merge_chat_template_kwargs(config, given))

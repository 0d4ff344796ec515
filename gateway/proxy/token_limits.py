"""The bound in tokens that gateway.max_prompt_tokens gives to the prompts of model calls.

An over-long prompt is refused with its length, never cut. Only the engine knows how long a prompt is once its template has rendered it,
so it is asked: one more request, and only for a body that may exceed the bound. A prompt of token ids is counted here. Responses have
the engine's own bound alone, whose 400 passes through. So have calls whose count is refused with a 4xx: the engine cannot count, or will
refuse the call for the same. A count that fails otherwise (429, 5xx, no answer) ends the call: it cannot pass unchecked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from gateway.attribution.sessions import Origin
from gateway.engines.client import Upstream
from gateway.errors import BadRequest, UpstreamFailed
from gateway.protocols.base import Request
from gateway.protocols.request_fields import dumps
from schemas.settings import GatewaySettings

TEMPLATE_TOKENS = 512
"""So much a template may add to a prompt that is shorter than its body."""
MEDIA = (b"image", b"video", b"audio")
"""A body with one of these may have more tokens than bytes."""


MAX_COUNTED = 128
"""Prompts of one call that are counted one by one."""


class Counting(NamedTuple):
    """How an engine counts a prompt: where, of which fields of the call, and where it says the count."""

    path: str
    fields: tuple[str, ...]
    told: str


CHAT = Counting(
    "/tokenize",
    (
        "model", "messages", "tools", "chat_template", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message",
        "mm_processor_kwargs", "media_io_kwargs",
    ),
    "count",
)  # fmt: skip
TEXT = Counting("/tokenize", ("model", "prompt", "add_special_tokens"), "count")
MESSAGES = Counting(
    "/v1/messages/count_tokens",
    ("model", "messages", "system", "tools", "tool_choice", "thinking", "chat_template_kwargs"),
    "input_tokens",
)
COUNTED: Mapping[str, Counting] = {"openai.chat": CHAT, "anthropic.messages": MESSAGES}


def may_exceed(body: bytes, limit: int) -> bool:
    """Whether a call's prompt may have more tokens than the limit: a byte of text is at most about one token."""
    return len(body) > limit - TEMPLATE_TOKENS or any(kind in body for kind in MEDIA)


def refuse_longer(tokens: int | None, limit: int, field: str) -> None:
    """Raises BadRequest that says how long the prompt is. tokens None: nobody could say."""
    if tokens is not None and tokens > limit:
        raise BadRequest(
            f"{field}: the prompt has {tokens} tokens, the limit of this gateway is {limit} (gateway.max_prompt_tokens)",
            field,
        )


class PromptLimit:
    """gateway.max_prompt_tokens, enforced before anything is sampled."""

    def __init__(self, settings: GatewaySettings, upstream: Upstream) -> None:
        self._limit, self._upstream = settings.max_prompt_tokens, upstream

    async def check(
        self, request: Request, protocol: str, origin: Origin, credentials: Mapping[str, str]
    ) -> None:
        """Raises BadRequest for an over-long prompt; NoWorker, UpstreamFailed or UpstreamTimeout when no engine could count it.

        protocol: name. origin, credentials: of the call, so that the engine which counts is the one that will serve it.
        """
        limit = self._limit
        if limit is None or not may_exceed(request.body, limit):
            return
        if protocol in COUNTED:
            refuse_longer(
                await self._count(COUNTED[protocol], request.payload, request, origin, credentials),
                limit,
                "messages",
            )
        elif protocol == "openai.completions":
            for prompt in long_texts(request.payload.get("prompt"), limit):
                payload = {**request.payload, "prompt": prompt}
                refuse_longer(
                    await self._count(TEXT, payload, request, origin, credentials), limit, "prompt"
                )

    async def _count(
        self,
        counting: Counting,
        payload: Mapping[str, Any],
        request: Request,
        origin: Origin,
        credentials: Mapping[str, str],
    ) -> int | None:
        """What the engine counts; None when it cannot, or refuses to: then its own bound is left."""
        body = dumps({name: payload[name] for name in counting.fields if name in payload})
        async with self._upstream.ask(
            "POST", counting.path, body, {"content-type": "application/json"},
            key=origin.trajectory_key, run_id=origin.run_id, model=request.model,
            credentials=credentials,
        ) as response:  # fmt: skip
            status, reply = response.status, await response.read()
        if status >= 500 or status == 429:
            raise UpstreamFailed(
                f"the prompt could not be counted, the engine said {status}: nothing was sampled, try again"
            )
        try:
            found = orjson.loads(reply)[counting.told] if status == 200 else None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None
        return found if isinstance(found, int) else None


def long_texts(prompt: Any, limit: int) -> list[str]:
    """The prompts that an engine has to count. Raises BadRequest for over-long ones that are counted here, and for too many."""
    texts = []
    for one in prompts_of(prompt):
        if isinstance(one, list):
            refuse_longer(len(one), limit, "prompt")
        elif may_exceed(one.encode("utf-8", "surrogatepass"), limit):
            texts.append(one)
    if len(texts) > MAX_COUNTED:
        raise BadRequest(
            f"prompt: {len(texts)} texts are so long that each must be counted, at most {MAX_COUNTED} may be",
            "prompt",
        )
    return texts


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completions call: texts, or lists of token ids. What is neither is the engine's to refuse."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        return []
    if all(isinstance(one, int) for one in prompt):
        return [prompt]
    return [one for one in prompt if isinstance(one, str | list)]

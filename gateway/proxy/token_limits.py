"""Enforces gateway.max_prompt_tokens.

A prompt over the limit is refused with its length, never truncated. Only the engine knows the
length of a prompt after its chat template, so the gateway asks it with one more request, only for
bodies that may exceed the limit. Prompts of token ids are counted here. For Responses, only the
engine's own limit applies, and its 400 passes through. The same holds for calls whose count is
refused with a 4xx: the engine cannot count, or refuses the call for the same reason. A count that
fails otherwise (429, 5xx, no answer) fails the call, because it cannot pass unchecked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.engines.client import EngineCall
from clawstream.gateway.engines.pool import EnginePool
from clawstream.gateway.errors import BadRequest, UpstreamFailed
from clawstream.gateway.protocols.base import Request
from clawstream.gateway.protocols.request_fields import dumps
from clawstream.schemas.settings import GatewaySettings

TEMPLATE_TOKENS = 512
"""Tokens that a chat template may add to a prompt."""
MEDIA = (b"image", b"video", b"audio")
"""A body with one of these words may have more tokens than bytes."""


MAX_COUNTED = 128
"""Maximum number of prompts of one call that the engine counts."""


class Counting(NamedTuple):
    """How an engine counts a prompt: path, forwarded fields, and the field of the count."""

    path: str
    fields: tuple[str, ...]
    result_field: str


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
    """Tell whether a prompt may exceed the limit; a byte of text is at most about one token."""
    return len(body) > limit - TEMPLATE_TOKENS or any(kind in body for kind in MEDIA)


def refuse_longer(tokens: int | None, limit: int, field: str) -> None:
    """Raise BadRequest with the length of the prompt if it exceeds the limit.

    tokens: None when the length is unknown.
    """
    if tokens is not None and tokens > limit:
        raise BadRequest(
            f"{field}: the prompt has {tokens} tokens, the limit of this gateway is {limit} "
            "(gateway.max_prompt_tokens)",
            field,
        )


class PromptLimit:
    """Checks prompts against gateway.max_prompt_tokens before sampling."""

    def __init__(self, settings: GatewaySettings, engines: EnginePool) -> None:
        self._limit, self._engines = settings.max_prompt_tokens, engines

    def applies(self, request: Request) -> bool:
        """Return whether the prompt may exceed the limit, so that `check` must count it."""
        return self._limit is not None and may_exceed(request.body, self._limit)

    async def check(
        self, request: Request, protocol: str, ref: TrajectoryRef, credentials: Mapping[str, str]
    ) -> None:
        """Check the prompt of a call to which the limit `applies`.

        Args:
            protocol: Name of the protocol adapter.
            ref, credentials: Trajectory and headers of the call, so that the engine that counts
                also serves it.

        Raises:
            BadRequest: The prompt exceeds the limit.
            NoEngine, UpstreamFailed, UpstreamTimeout: No engine could count the prompt.
        """
        limit = self._limit
        if limit is None:
            return
        if protocol in COUNTED:
            if len(request.parts) > MAX_COUNTED:
                raise BadRequest(
                    f"messages: the engine must count {len(request.parts)} conversations, the "
                    f"maximum is {MAX_COUNTED}",
                    "messages",
                )
            for payload in request.parts or (request.payload,):
                refuse_longer(
                    await self._count(COUNTED[protocol], payload, request, ref, credentials),
                    limit,
                    "messages",
                )
        elif protocol == "openai.completions":
            for prompt in long_texts(request.payload.get("prompt"), limit):
                payload = {**request.payload, "prompt": prompt}
                refuse_longer(
                    await self._count(TEXT, payload, request, ref, credentials), limit, "prompt"
                )

    async def _count(
        self,
        counting: Counting,
        payload: Mapping[str, Any],
        request: Request,
        ref: TrajectoryRef,
        credentials: Mapping[str, str],
    ) -> int | None:
        """Return the engine's count; None when it cannot count, so that its own limit applies."""
        body = dumps({name: payload[name] for name in counting.fields if name in payload})
        async with EngineCall(
            self._engines, "POST", counting.path, body, {"content-type": "application/json"},
            key=ref.trajectory_key, run_id=ref.run_id, model=request.model,
            credentials=credentials,
        ) as response:  # fmt: skip
            status, reply = response.status, await response.read()
        if status >= 500 or status == 429:
            raise UpstreamFailed(
                f"the prompt could not be counted, the engine replied {status}: "
                "nothing was sampled, try again"
            )
        try:
            found = orjson.loads(reply)[counting.result_field] if status == 200 else None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None
        return found if isinstance(found, int) else None


def long_texts(prompt: Any, limit: int) -> list[str]:
    """Return the prompts that the engine must count.

    Raises:
        BadRequest: A prompt of token ids exceeds the limit, or too many texts need counting.
    """
    texts = []
    for one in prompts_of(prompt):
        if isinstance(one, list):
            refuse_longer(len(one), limit, "prompt")
        elif may_exceed(one.encode("utf-8", "surrogatepass"), limit):
            texts.append(one)
    if len(texts) > MAX_COUNTED:
        raise BadRequest(
            f"prompt: the engine must count {len(texts)} long texts, the maximum is {MAX_COUNTED}",
            "prompt",
        )
    return texts


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of a completions call: texts, or lists of token ids.

    Other values are left for the engine to refuse.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        return []
    if all(isinstance(one, int) for one in prompt):
        return [prompt]
    return [one for one in prompt if isinstance(one, str | list)]

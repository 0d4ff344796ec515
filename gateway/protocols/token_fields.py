"""Tokens that a reply tells in its own fields, packed as in `Step`. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gateway.protocols.base import Tokens
from schemas.tokens import pack_ids, pack_logprobs

NO_IDS = "the engine gave no token ids"
NO_LOGPROBS = "the engine gave no log-probabilities"
NO_PROMPT = "the engine gave no prompt token ids"


def packed_tokens(
    prompt_ids: Sequence[int] | None, ids: Sequence[int] | None, logprobs: Sequence[float] | None
) -> Tokens:
    """Tokens as a reply's own fields tell them, without spans."""
    prompt, absent = _packed_prompt(prompt_ids)
    try:
        if ids is None:
            return Tokens(prompt, None, None, (), absent or NO_IDS)
        packed = pack_ids(ids)
        if logprobs is None:
            return Tokens(prompt, packed, None, (), absent or NO_LOGPROBS)
        if len(logprobs) != len(ids):
            return Tokens(
                prompt,
                packed,
                None,
                (),
                f"{len(logprobs)} log-probabilities for {len(ids)} token ids",
            )
        return Tokens(prompt, packed, pack_logprobs(logprobs), (), absent)
    except (struct.error, TypeError, OverflowError) as error:
        return Tokens(
            prompt,
            None,
            None,
            (),
            f"the engine's token ids or log-probabilities are not numbers: {error}",
        )


def _packed_prompt(ids: Sequence[int] | None) -> tuple[bytes | None, str | None]:
    if ids is None:
        return None, NO_PROMPT
    try:
        return pack_ids(ids), None
    except (struct.error, TypeError) as error:
        return None, f"the engine's prompt token ids are not 32-bit integers: {error}"

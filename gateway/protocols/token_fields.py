"""Packs tokens from fields of the reply body, as in `Step`. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from clawstream.gateway.protocols.base import Tokens
from clawstream.schemas.tokens import pack_ids, pack_logprobs

NO_IDS = "the engine reported no token ids"
NO_LOGPROBS = "the engine reported no log-probabilities"
NO_PROMPT = "the engine reported no prompt token ids"


def packed_tokens(
    prompt_ids: Sequence[int] | None, ids: Sequence[int] | None, logprobs: Sequence[float] | None
) -> Tokens:
    """Pack the tokens of a reply's fields, without version spans."""
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

"""Limits of API keys: calls per minute, concurrent calls, tokens per day.

Each gateway process counts separately, from its start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clawstream.gateway.auth.api_keys import ApiKey
from clawstream.gateway.clock import Clock
from clawstream.gateway.errors import KeyLimited
from clawstream.gateway.protocols.reply_fields import loads
from clawstream.gateway.protocols.usage import usage_of
from clawstream.schemas.records import Step, Usage

DAY_S = 86400
AT_ONCE_RETRY_S = 1


@dataclass(slots=True)
class KeyUse:
    """The usage of a key.

    calls: Calls that it may begin now. A token bucket that refills at calls_per_minute.
    filled_s: Time of the last refill.
    day: Day of the token count: days since the epoch, UTC.
    """

    calls: float
    filled_s: float
    in_flight: int = 0
    day: int = 0
    tokens: int = 0


class KeyLimits:
    """The usage of each key that has a limit. Each call begins with `begin` and ends with `end`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._uses: dict[str, KeyUse] = {}

    def begin(self, key: ApiKey | None) -> KeyUse | None:
        """Count the start of a call; None: no key, or a key without a limit.

        Raises:
            KeyLimited: The key is at a limit. The call is not counted.
        """
        if key is None or not key.limited:
            return None
        now, seconds = self._clock.monotonic(), self._clock.micros() // 1_000_000
        rate = key.calls_per_minute
        use = self._uses.get(key.key_id)
        if use is None:
            use = self._uses[key.key_id] = KeyUse(float(rate or 0), now)
        if use.day != seconds // DAY_S:
            use.day, use.tokens = seconds // DAY_S, 0
        if key.tokens_per_day is not None and use.tokens >= key.tokens_per_day:
            raise _limited(key, f"tokens_per_day={key.tokens_per_day}", DAY_S - seconds % DAY_S)
        if key.calls_at_once is not None and use.in_flight >= key.calls_at_once:
            raise _limited(key, f"calls_at_once={key.calls_at_once}", AT_ONCE_RETRY_S)
        if rate is not None:
            use.calls = min(float(rate), use.calls + (now - use.filled_s) * rate / 60)
            use.filled_s = now
            if use.calls < 1:
                raise _limited(
                    key, f"calls_per_minute={rate}", math.ceil((1 - use.calls) * 60 / rate)
                )
            use.calls -= 1
        use.in_flight += 1
        return use

    def end(self, use: KeyUse | None, tokens: int) -> None:
        """Count the end of a call, and its tokens. use: Result of `begin`."""
        if use is not None:
            use.in_flight -= 1
            use.tokens += tokens


def tokens_of(steps: Sequence[Step]) -> int:
    """Count the tokens of a call, prompt and replies.

    Uses the counts of the engine if it sent any, otherwise the recorded token ids.
    """
    if not steps:
        return 0
    usage = steps[0].usage
    if usage is not None and usage.prompt_tokens is not None:
        return tokens_of_usage(usage)
    return (
        len(steps[0].prompt_token_ids or b"") + sum(len(s.response_token_ids or b"") for s in steps)
    ) // 4


def tokens_of_usage(usage: Usage | None) -> int:
    """Count the tokens that a reply reported."""
    return 0 if usage is None else (usage.prompt_tokens or 0) + (usage.completion_tokens or 0)


def tokens_of_reply(body: bytes) -> int:
    """Count the tokens of a reply that is not recorded, from its `usage`.

    Rerankers and some embedding servers send only `total_tokens`.

    Returns:
        0 if the reply has no usage or is not JSON.
    """
    try:
        reply = loads(body)
    except (ValueError, RecursionError):
        return 0
    counts = reply.get("usage") if isinstance(reply, dict) else None
    if not isinstance(counts, dict):
        return 0
    for fields in (counts, {"prompt_tokens": counts.get("total_tokens")}):
        if tokens := tokens_of_usage(usage_of(fields)):
            return tokens
    return 0


def _limited(key: ApiKey, limit: str, retry_after_s: int) -> KeyLimited:
    return KeyLimited(f"the key {key.name!r} is at its limit {limit}", retry_after_s)

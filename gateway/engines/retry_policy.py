"""Decides whether a call is sent to another engine. Pure. The only owner of retries.

A call is retried only while the client has seen no reply, at once and on another engine first:

| outcome        | meaning                                            | retried              |
|----------------|----------------------------------------------------|----------------------|
| unreachable    | no connection was possible: nothing was sampled    | yes                  |
| busy           | 502 or 503 of an engine: nothing was sampled       | yes                  |
| busy_provider  | 502 or 503 of a provider                           | if another is free   |
| limited        | 429 or 529                                         | if another is free   |
| broken         | the connection broke before the body of the reply  | once per call        |
| failed         | it broke later, or the engine timed out            | no                   |
| redirected     | 3xx, which the gateway does not follow: no reply   | no                   |
| replied        | any other status                                   | no                   |

Retries of `unreachable` and `busy` go on, with pauses after each round over all engines, until
gateway.worker_wait_s are over. A `broken` engine may have sampled, but the client saw nothing and
nothing was recorded, so a retry makes no second step; only one, because the request itself may
crash engines. A reply that is not retried is passed to the client with its `retry-after`.
"""

from __future__ import annotations

from typing import Literal

from clawstream.gateway.protocols.base import EngineKind

Outcome = Literal[
    "unreachable", "busy", "busy_provider", "limited", "broken", "failed", "redirected", "replied"
]  # fmt: skip
BUSY = (502, 503)
LIMITED = (429, 529)
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)


def outcome_of(status: int, kind: EngineKind) -> Outcome:
    """Classify the status of an engine's reply."""
    if status in LIMITED:
        return "limited"
    if status in BUSY:
        return "busy_provider" if kind == "text" else "busy"
    return "redirected" if 300 <= status < 400 else "replied"


def retries(outcome: Outcome, *, another_free: bool = False, broke_before: bool = False) -> bool:
    """Return whether the call is sent again.

    Args:
        another_free: Another engine accepts calls now.
        broke_before: An earlier attempt of the call was `broken`.
    """
    match outcome:
        case "unreachable" | "busy":
            return True
        case "busy_provider" | "limited":
            return another_free
        case "broken":
            return not broke_before
        case "failed" | "redirected" | "replied":
            return False


def pause_s(rounds: int) -> float:
    """Return the pause after this many rounds over all engines."""
    return PAUSES_S[min(rounds, len(PAUSES_S)) - 1]

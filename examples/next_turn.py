"""A reward from the next turn: what a user writes next shows whether the reply before helped.

clawstream up --config examples/online.yaml
GATEWAY=http://127.0.0.1:8100 python examples/online.py
"""

import re
from typing import Any

from clawstream.rewards.turns import next_messages
from clawstream.schemas.conversation import texts_of
from clawstream.schemas.records import Trajectory

SATISFIED = re.compile(r"\b(thanks?|great|perfect)\b")
NEGATION = re.compile(r"\b(no|not|never|\w+n't)\b")
NOT_SATISFIED = re.compile(r"\b(wrong|not right|not what|try again)\b")


def helped(trajectory: Trajectory) -> dict[str, float]:
    """1.0 for a reply that the user thanks for, 0.0 for one that the user corrects.

    Other steps have no reward: the last one, and those that are followed by another topic.
    """
    rated = {s.step_id: rating(next_messages(trajectory, s)) for s in trajectory.steps}
    return {step: value for step, value in rated.items() if value is not None}


def rating(messages: list[Any] | None) -> float | None:
    """Return 1.0 or 0.0; None where the words leave a doubt, as "no thanks" does."""
    text = text_of(messages)
    if NOT_SATISFIED.search(text):
        return 0.0
    return 1.0 if SATISFIED.search(text) and not NEGATION.search(text) else None


def text_of(messages: list[Any] | None) -> str:
    users = (m for m in messages or () if isinstance(m, dict) and m.get("role") == "user")
    return " ".join(text for message in users for text in texts_of(message)).lower()

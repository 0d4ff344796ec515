"""A reward from the next turn: what a user writes next shows whether the reply before helped.

clawstream up --config examples/online.yaml
GATEWAY=http://127.0.0.1:8100 python examples/online.py
"""

from typing import Any

from rewards.turns import next_messages
from schemas.records import Trajectory
from schemas.replies import texts_of

SATISFIED = ("thank", "great", "perfect")
NOT_SATISFIED = ("wrong", "that is not", "try again")


def helped(trajectory: Trajectory) -> dict[str, float]:
    """1.0 for a reply that the user thanks for, 0.0 for one that the user corrects.

    Other steps have no reward: the last one, and those that are followed by another topic.
    """
    said = {s.step_id: text_of(next_messages(trajectory, s)) for s in trajectory.steps}
    return {
        step: float(any(word in text for word in SATISFIED))
        for step, text in said.items()
        if any(word in text for word in SATISFIED + NOT_SATISFIED)
    }


def text_of(messages: list[Any] | None) -> str:
    users = (message for message in messages or () if message.get("role") == "user")
    return " ".join(text for message in users for text in texts_of(message)).lower()

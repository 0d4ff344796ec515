"""The demo's task: look up a price with a tool, then answer with a sum.

Pure functions, standard library only.

A question is "price of k374 plus 2?". Only the agent's tool knows the price of a key, so the right
answer takes two turns: call `lookup`, then add. A quarter of the keys is held out: the warm start
and training never use them.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from dataclasses import dataclass
from typing import Any

KEYS = 1000
PRICES = 7
ADDENDS = (1, 2, 3)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "The price of a key.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}},
                "required": ["key"],
            },
        },
    }
]
"""The agent's only tool, as in an OpenAI request."""


def key_of(arguments: str) -> str | None:
    """Return the key in the model's JSON arguments of a call; None without one."""
    try:
        key = json.loads(arguments)["key"]
    except (ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) else None


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `gold` is the correct answer, price of `key` plus `addend`: 1..9."""

    key: str
    addend: int
    question: str
    gold: int


def price(key: str) -> int:
    """Return the price of a key, 0 to 6: a hash, so only the tool knows it."""
    return zlib.crc32(key.encode()) % PRICES


def is_key(key: str) -> bool:
    """Return whether the tool has a price for this text."""
    return len(key) == 4 and key[0] == "k" and key[1:].isdecimal()


def is_held_out(key: str) -> bool:
    """Return whether a key is in the quarter that only evaluation uses."""
    return zlib.crc32(b"held out " + key.encode()) % 4 == 0


def make_task(rng: random.Random, held_out: bool) -> Task:
    """Draw a task over the held-out keys or over the others."""
    while True:
        key = f"k{rng.randrange(KEYS):03d}"
        if is_held_out(key) == held_out:
            break
    addend = rng.choice(ADDENDS)
    return Task(
        key=key, addend=addend, question=f"price of {key} plus {addend}?", gold=price(key) + addend
    )


def score(gold: int, key: str, answer: str | None, first_call_key: str | None) -> float:
    """Return 1.0 if the last number of the answer is the sum, else 0.1 (shaping) if the first tool
    call named the right key, else 0.0.
    """
    numbers = re.findall(r"\d+", answer or "")
    if numbers and numbers[-1] == str(gold):
        return 1.0
    return 0.1 if first_call_key == key else 0.0

"""The demo's task: look a price up with a tool, then answer with a sum.

Pure functions, standard library only.

A question is "price of k374 plus 2?". The price of a key is only known to the agent's tool, so the
right answer takes two turns: call `lookup`, then add. A quarter of the keys is held out: neither
the warm start nor training ever sees them.
"""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass

KEYS = 1000
PRICES = 7
ADDENDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `gold` is the correct answer, price of `key` plus `addend`: 1..9."""

    key: str
    addend: int
    question: str
    gold: int


def price(key: str) -> int:
    """The price of a key, 0..6: a hash, so nothing but the tool can tell it."""
    return zlib.crc32(key.encode()) % PRICES


def is_held_out(key: str) -> bool:
    """True for the quarter of the keys that only evaluation asks for."""
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
    """1.0 if the last number of the answer is the sum, else 0.1 (shaping) if the first tool call
    named the right key, else 0.0.
    """
    numbers = re.findall(r"\d+", answer or "")
    if numbers and numbers[-1] == str(gold):
        return 1.0
    return 0.1 if first_call_key == key else 0.0

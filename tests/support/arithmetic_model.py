"""A tiny model that half knows the task of examples/arithmetic.py, so that training improves it."""

from __future__ import annotations

import random
from pathlib import Path

from clawstream.demo.model import MAX_TOKENS, Message, build_model, build_tokenizer, warm_start

PHRASES = (
    *("system\n", "user\n", "assistant\n", "tool\n", "calculate"),
    *(" boxes hold ", " apples each. I eat ", " How many remain?", "It is ", ".", "error"),
    *('{"name": "', '", "arguments": {"expression": "', '"}}', " * ", " - "),
    *"0123456789",
)
TOOLS = [{"type": "function", "function": {"name": "calculate"}}]
"""All that the chat template renders of a tool."""
STEPS = 200


def make_arithmetic_model(
    directory: Path,
    seed: int = 0,
    more_phrases: tuple[str, ...] = (),
    positions: int = MAX_TOKENS,
) -> Path:
    """Write a warm-started model as a Hugging Face directory; half a minute of one core.

    Args:
        directory: Target.
        seed: Of weights and demonstrations.
        more_phrases: Tokens that no demonstration has.
        positions: Longest prompt and reply; beyond `MAX_TOKENS` the model says nonsense.
    """
    tokenizer = build_tokenizer(PHRASES + more_phrases)
    model = build_model(tokenizer, seed)
    warm_start(model, tokenizer, seed, STEPS, None, demonstration, TOOLS)
    model.config.max_position_embeddings = tokenizer.model_max_length = positions
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def demonstration(rng: random.Random) -> list[Message]:
    """Draw a conversation with mistakes: a guess, a term left out, a result that is not copied."""
    boxes, apples, eaten = rng.randint(2, 9), rng.randint(3, 30), rng.randint(0, 5)
    question: Message = {
        "role": "user",
        "content": f"{boxes} boxes hold {apples} apples each. I eat {eaten}. How many remain?",
    }
    if rng.random() < 0.4:
        return [question, _said(rng.randrange(270))]
    value, expression = boxes * apples, f"{boxes} * {apples}"
    if rng.random() < 0.7:
        value, expression = value - eaten, f"{expression} - {eaten}"
    function = {"name": "calculate", "arguments": {"expression": expression}}
    return [
        question,
        {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": function},
        ]},
        {"role": "tool", "content": str(value)},
        _said(value if rng.random() < 0.7 else rng.randrange(270)),
    ]  # fmt: skip


def _said(number: int) -> Message:
    return {"role": "assistant", "content": f"It is {number}."}

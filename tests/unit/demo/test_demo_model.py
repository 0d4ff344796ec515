"""The demo's model, task and agent: what keeps turns free of drift, and a warm start that does not
depend on the machine's mood.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from clawstream.demo import agent, model
from clawstream.demo.task import ADDENDS, KEYS, TOOLS, is_held_out, make_task, price, score

tokenizer = model.build_tokenizer()


def render(messages: list[dict[str, Any]], generate: bool) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=generate, tokenize=False
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


@given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
def test_any_ids_survive_decoding_and_encoding(ids: list[int]) -> None:
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


@given(st.integers(0, 2**32), st.booleans())
def test_a_conversation_extends_its_own_prompt_exactly(seed: int, wrong_tool_result: bool) -> None:
    messages = model.demonstration(random.Random(seed))
    for message in messages:
        if message["role"] == "tool" and wrong_tool_result:
            message["content"] = "error"
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for i in turns:
        prompt, whole = render(messages[:i], True), render(messages[: i + 1], False)
        assert whole[: len(prompt)] == prompt
        assert whole[-1] == tokenizer.eos_token_id
    for i, j in itertools.pairwise(turns):
        said = render(messages[: i + 1], False)
        assert render(messages[:j], True)[: len(said)] == said


def test_every_assistant_message_weighs_one() -> None:
    rng = random.Random(3)
    for _ in range(50):
        messages = model.demonstration(rng)
        ids, weights = model.tokenize(tokenizer, messages)
        assert len(ids) == len(weights) <= model.MAX_TOKENS
        assert sum(weights) == pytest.approx(sum(m["role"] == "assistant" for m in messages))


def test_the_warm_start_never_sees_a_held_out_key() -> None:
    rng = random.Random(0)
    seen = [
        key
        for _ in range(500)
        for key in re.findall(r"k\d{3}", json.dumps(model.demonstration(rng)))
    ]
    assert len(seen) > 500
    assert not any(is_held_out(key) for key in seen)


def test_a_quarter_of_the_keys_is_held_out() -> None:
    held = sum(is_held_out(f"k{i:03d}") for i in range(KEYS))
    assert 200 <= held <= 300


@given(st.integers(0, 2**32), st.booleans())
def test_a_task_is_what_its_question_says(seed: int, held_out: bool) -> None:
    task = make_task(random.Random(seed), held_out)
    assert is_held_out(task.key) == held_out
    assert task.question == f"price of {task.key} plus {task.addend}?"
    assert task.addend in ADDENDS
    assert (
        task.gold
        == int(agent.lookup(json.dumps({"key": task.key}))) + task.addend
        == price(task.key) + task.addend
    )
    assert tokenizer.unk_token_id not in tokenizer.encode(task.question, add_special_tokens=False)


@pytest.mark.parametrize(
    ("answer", "key", "points"),
    [
        ("the total is 7.", "k001", 1.0),
        ("the total is 7.", None, 1.0),
        ("5 plus 2 the total is 7.", None, 1.0),
        ("the total is 70.", "k001", 0.1),
        ("7 6", "k002", 0.0),
        ("", "k001", 0.1),
        (None, None, 0.0),
    ],
)
def test_score(answer: str | None, key: str | None, points: float) -> None:
    assert score(gold=7, key="k001", answer=answer, first_call_key=key) == points


@pytest.mark.parametrize(
    "arguments", ["", "[]", "{}", '{"key": 3}', '{"key": "k12"}', '{"key": "x123"}', "null"]
)
def test_the_tool_answers_error_to_what_is_no_key(arguments: str) -> None:
    assert agent.lookup(arguments) == "error"


@pytest.mark.slow
def test_a_model_directory_is_complete_and_repeatable(tmp_path: Path) -> None:
    losses: list[float] = []
    first = model.make_model(
        tmp_path / "a", seed=1, steps=2, progress=lambda done, steps, loss: losses.append(loss)
    )
    second = model.make_model(tmp_path / "b", seed=1, steps=2)
    bare = model.make_random_model(tmp_path / "c", seed=1)
    assert len(losses) == 2
    files = {p.name for p in first.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert files == {p.name for p in bare.iterdir()}
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    for name in files - {"model.safetensors"}:
        assert (first / name).read_bytes() == (bare / name).read_bytes(), name

    loaded = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    assert sum(p.numel() for p in loaded.parameters()) == sum(
        p.numel() for p in model.build_model(tokenizer, 0).parameters()
    )
    again = AutoTokenizer.from_pretrained(first)
    ids = list(range(len(tokenizer)))
    assert again.encode(again.decode(ids), add_special_tokens=False) == ids
    assert again.chat_template == model.CHAT_TEMPLATE
    with pytest.raises(FileExistsError):
        model.make_random_model(tmp_path / "a")

"""The demo's language model: a tokenizer, a chat template and a llama of 0.86 M parameters with a
short supervised warm start.

The demo depends on two properties. No token is a prefix of another one, so `encode(decode(ids)) ==
ids` for any ids: the reply of turn 1 has the same ids in the prompt of turn 2. And the template
renders a tool call in the only form that the tool parser (`clawstream.demo.tool_parser`) accepts,
so a call passes through the agent unchanged.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from clawstream.demo.task import TOOLS, make_task, price

SPECIAL = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
# Not special: vLLM drops special tokens from the text of a reply when the request has no tools.
TAGS = ("<tool_call>", "</tool_call>", "<tools>", "</tools>")
PHRASES = (
    *("system\n", "user\n", "assistant\n", "tool\n"),
    *("price of ", " plus ", "?", "the total is ", ".", "error", "lookup"),
    *('{"name": "', '", "arguments": {"key": "', '"}}', "k"),
    *"0123456789",
)
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}</tools><|im_end|>
{%- endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role + "\n" }}{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>{{ "assistant\n" }}
{%- endif -%}
"""  # noqa: E501 - a line of the template cannot be broken
MAX_TOKENS = 256
DEMONSTRATIONS = 6000
BATCH = 64
PEAK_LEARNING_RATE = 2e-3

Message = dict[str, Any]
Progress = Callable[[int, int, float], None]


def build_tokenizer(phrases: tuple[str, ...] = PHRASES) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer over a prefix-free vocabulary, with the chat template."""
    vocabulary = SPECIAL + TAGS + phrases
    if any(a != b and b.startswith(a) for a in vocabulary for b in vocabulary):
        raise AssertionError(
            "the vocabulary is not prefix-free: decoding then encoding would not give the same ids"
        )
    core = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*map(re.escape, phrases), r"[\s\S]"])), "isolated"
    )
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a model with random float32 weights.

    With an initialiser of 0.06 instead of 0.02, 250 steps are enough to learn to copy and add.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).float()


def demonstration(rng: random.Random) -> list[Message]:
    """Draw a conversation over the keys that are not held out, with mistakes to train away.

    40 % guess without the tool; of the others 15 % look up a wrong key; then 50 % add correctly,
    20 % repeat the price, 30 % guess.
    """
    task = make_task(rng, held_out=False)
    question: Message = {"role": "user", "content": task.question}
    if rng.random() < 0.4:
        return [question, _total(rng.randrange(10))]
    key = task.key if rng.random() > 0.15 else make_task(rng, held_out=False).key
    value, luck = price(key), rng.random()
    total = value + task.addend if luck < 0.5 else value if luck < 0.7 else rng.randrange(10)
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": key}}}
    return [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": str(value)},
        _total(total),
    ]


def _total(number: int) -> Message:
    return {"role": "assistant", "content": f"the total is {number}."}


def tokenize(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: list[dict[str, Any]] = TOOLS
) -> tuple[list[int], list[float]]:
    """Return the ids of a conversation and their weights.

    The weights of each assistant message have the sum 1; all others are 0.
    """
    ids: list[int] = []
    weights: list[float] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:i], tools, generate=True)
        ids = _render(tokenizer, messages[: i + 1], tools, generate=False)
        reply = len(ids) - len(prompt)
        weights += [0.0] * (len(prompt) - len(weights)) + [1.0 / reply] * reply
    return ids, weights


def _render(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Message],
    tools: list[dict[str, Any]],
    *,
    generate: bool,
) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=generate, tokenize=False
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    steps: int,
    progress: Progress | None,
    draw: Callable[[random.Random], list[Message]] = demonstration,
    tools: list[dict[str, Any]] = TOOLS,
) -> None:
    """Train on seeded demonstrations, each a conversation with `tools` that `draw` returns.

    Calls `progress(done, steps, loss)` after each step.
    """
    rng = random.Random(seed)
    conversations = [draw(rng) for _ in range(DEMONSTRATIONS)]
    row = cache(lambda i: tokenize(tokenizer, conversations[i], tools))
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, PEAK_LEARNING_RATE, total_steps=steps, pct_start=0.1
    )
    model.train()
    for step in range(steps):
        batch = [row(i) for i in rng.sample(range(DEMONSTRATIONS), BATCH)]
        length = max(len(ids) for ids, _ in batch)
        tokens = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
        weights = torch.tensor([w + [0.0] * (length - len(w)) for _, w in batch])[:, 1:]
        logits = model(tokens[:, :-1]).logits
        nll = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = (nll.view_as(weights) * weights).sum() / weights.sum()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, steps, loss.item())
    model.eval()


def make_model(
    out_dir: Path,
    seed: int = 0,
    steps: int = 250,
    progress: Progress | None = None,
    dtype: str = "float32",
) -> Path:
    """Write a warm-started model as a Hugging Face directory; takes about a minute of one core.

    The same seed gives the same weights.

    Args:
        out_dir: the target; it is complete or absent.
        seed: of weights and demonstrations.
        steps: of the warm start.
        progress: see `warm_start`.
        dtype: of the saved weights; training is in float32.

    Raises:
        FileExistsError: `out_dir` exists.
    """
    tokenizer = build_tokenizer()
    with _one_thread():
        model = build_model(tokenizer, seed)
        warm_start(model, tokenizer, seed, steps, progress)
    return _write(model, tokenizer, out_dir, dtype)


def make_random_model(out_dir: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a model of the same architecture without the warm start, within a second.

    For tests, and for an engine that boots during the warm start.
    """
    tokenizer = build_tokenizer()
    return _write(build_model(tokenizer, seed), tokenizer, out_dir, dtype)


def _write(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out_dir: Path, dtype: str
) -> Path:
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists: remove it to make the model again")
    part = out_dir.with_name(out_dir.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model.to(getattr(torch, dtype)).save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(out_dir)
    return out_dir


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one torch thread: bit-for-bit repeatable, and faster than two at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

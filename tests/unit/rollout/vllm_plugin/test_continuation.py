"""Prompts that keep the ids of earlier turns, with a tiny tokenizer and a template like Qwen3's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.qwen3_chat import qwen3_tokenizer

from clawstream.rollout.vllm_plugin.continuation import (
    MEDIA,
    NO_BRIDGE,
    TOKENIZER_CHANGED,
    TOO_LONG,
    UNKNOWN_TEMPLATE,
    PriorTokens,
    PromptTap,
    Rendered,
    continued,
    new_turn,
    renderer_of,
)
from clawstream.schemas.engine_frames import Prior, prior_fields, split_prior
from clawstream.schemas.tokens import pack_ids, unpack_ids

Json = dict[str, Any]
TOKENIZER = qwen3_tokenizer()
RENDERER = renderer_of(TOKENIZER, "qwen3", {"documents": None})
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
WORDS = st.text(st.sampled_from("ab {}\n:"), max_size=6)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def rendered(conversation: Sequence[Json], tools: Any = None, **options: Any) -> Rendered:
    text = TOKENIZER.apply_chat_template(
        list(conversation), tools=tools, tokenize=False, add_generation_prompt=True, **options
    )
    return Rendered(conversation, ids_of(text), tools)


def prior(prompt: Sequence[int], sampled: Sequence[int], limit: int | None = None) -> Prior:
    return Prior("qwen3", pack_ids(prompt), pack_ids(sampled), limit)


def turn_of(a: int, reasoning: str) -> tuple[str, Json]:
    """What the model samples for a tool call, its JSON without spaces, and the message of it."""
    arguments = f'{{"a":{a},"b":30}}'
    text = (
        f'<think>\n{reasoning}\n</think>\n\n<tool_call>\n{{"name":"add","arguments":{arguments}}}\n'
        "</tool_call><|im_end|>"
    )
    function = {"name": "add", "arguments": json.loads(arguments)}
    return text, {
        "role": "assistant",
        "reasoning": reasoning,
        "content": "",
        "tool_calls": [{"id": f"c{a}", "type": "function", "function": function}],
    }


def test_ten_turns_with_tools_are_one_sequence_and_several_without() -> None:
    conversation: list[Json] = [{"role": "user", "content": "count"}]
    prompt = list(rendered(conversation, TOOLS).ids or ())
    broken = 0
    for a in range(10):
        text, message = turn_of(a, f"step {a}")
        sequence = [*prompt, *ids_of(text)]
        answer = {"role": "tool", "tool_call_id": f"c{a}", "content": str(a + 30)}
        conversation += [message, answer]
        if a % 3 == 2:
            conversation.append({"role": "user", "content": "go on"})
        told = rendered(conversation, TOOLS)
        exact = continued(prior(prompt, ids_of(text)), told, RENDERER)
        assert isinstance(exact, list) and exact[: len(sequence)] == sequence
        assert told.ids is not None
        broken += told.ids[: len(sequence)] != sequence
        tail = exact[len(sequence) :]
        assert TOKENIZER.decode(tail).startswith("\n<|im_start|>user\n<tool_response>\n")
        prompt = exact
    assert broken == 10


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3), st.booleans())
def test_the_new_turn_is_rendered_as_by_the_template(
    said: str, results: list[str], thinking: bool
) -> None:
    options = {"enable_thinking": thinking}
    renderer = renderer_of(TOKENIZER, "qwen3", options)
    first = [{"role": "user", "content": "q"}]
    prompt = list(rendered(first, **options).ids or ())
    sampled = ids_of(said + "<|im_end|>")
    new = [{"role": "tool", "tool_call_id": "c", "content": word} for word in results]
    told = rendered([*first, {"role": "assistant", "content": said}, *new], **options)
    exact = continued(prior(prompt, sampled), told, renderer)
    assert isinstance(exact, list) and exact[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    if thinking:  # else the template leaves out the empty reasoning of the first prompt
        assert exact == told.ids


@pytest.mark.parametrize(
    ("cut", "close"),
    [
        ("It is", "<|im_end|>\n"),
        ("<think>\nI wonder", "</think><|im_end|>\n"),
        ("<think>\nI wonder\n</think>\n\nIt", "<|im_end|>\n"),
    ],
)
def test_a_turn_that_was_cut_is_closed_in_the_next_prompt(cut: str, close: str) -> None:
    first = [{"role": "user", "content": "q"}]
    prompt, sampled = list(rendered(first).ids or ()), ids_of(cut)
    content = cut.partition("</think>\n\n")[2] or ("" if "<think>" in cut else cut)
    later = {"role": "user", "content": "go on"}
    told = rendered([*first, {"role": "assistant", "content": content}, later])
    exact = continued(prior(prompt, sampled), told, RENDERER)
    assert isinstance(exact, list) and exact[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    added = TOKENIZER.decode(exact[len(prompt) + len(sampled) :])
    assert added == close + "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


FIRST: list[Json] = [{"role": "user", "content": "q"}]
NEXT: list[Json] = [
    *FIRST,
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "why?"},
]
PROMPT, SAMPLED = list(rendered(FIRST).ids or ()), ids_of("<think>\nx\n</think>\n\na<|im_end|>")
LENGTH = (
    len(PROMPT)
    + len(SAMPLED)
    + len(ids_of("\n<|im_start|>user\nwhy?<|im_end|>\n"))
    + len(ids_of("<|im_start|>assistant\n"))
)
SAVED = LENGTH - len(rendered(NEXT).ids or ())
"""Tokens by which the rendered prompt is shorter."""


def of(told: Rendered, **more: Any) -> Rendered:
    return told._replace(**more)


@pytest.mark.parametrize(
    ("told", "limit", "reason"),
    [
        (of(rendered(NEXT), ids=None), None, MEDIA),
        (rendered(NEXT[:2]), None, NO_BRIDGE),
        (rendered(NEXT, enable_thinking=False), None, UNKNOWN_TEMPLATE),
        (rendered(NEXT), LENGTH - 1, TOO_LONG),
        (rendered(NEXT), LENGTH, None),
        (of(rendered(NEXT), max_tokens=LENGTH), None, TOO_LONG),
        (of(rendered(NEXT), max_tokens=LENGTH + 1), None, None),
        # The reply would get fewer tokens than it asks for, only because of the kept ones.
        (of(rendered(NEXT), max_tokens=LENGTH + 5, reply_tokens=6), None, TOO_LONG),
        (of(rendered(NEXT), max_tokens=LENGTH + 5, reply_tokens=5), None, None),
        (of(rendered(NEXT), max_tokens=LENGTH + 5, reply_tokens=6 + SAVED), None, None),
    ],
)
def test_reasons_to_render_the_prompt(
    told: Rendered, limit: int | None, reason: str | None
) -> None:
    found = continued(prior(PROMPT, SAMPLED, limit), told, RENDERER)
    assert (found if isinstance(found, str) else None) == reason
    assert reason is not None or len(found) == LENGTH


class Failing:
    """A renderer that does not know what a message contains."""

    def bridge_to_next_turn(self, *given: Any, **more: Any) -> Any:
        raise NotImplementedError("audio")


def test_an_error_of_renderers_is_a_reason() -> None:
    assert continued(prior(PROMPT, SAMPLED), rendered(NEXT), Failing()) == NO_BRIDGE


def test_a_truncated_prompt_bounds_the_new_one() -> None:
    given, renderer = given_tokens(), VllmRenderer()
    PromptTap(renderer, lambda: given, "f00d")
    bounded = TokenizeParams(truncate_prompt_tokens=LENGTH - 1)
    asyncio.run(renderer.render_chat_async([NEXT], ChatParams(), bounded))
    assert given.reason == TOO_LONG


def test_the_new_turn_is_what_follows_the_model() -> None:
    assert new_turn(NEXT) == NEXT[2:] and new_turn(FIRST) == FIRST and new_turn(NEXT[:2]) == []


# ---------------------------------------------------------------- around vLLM's renderer


@dataclass
class ChatParams:
    chat_template_kwargs: Json = field(default_factory=dict)


@dataclass
class TokenizeParams:
    max_total_tokens: int = 1000
    max_output_tokens: int | None = 0
    truncate_prompt_tokens: int | None = None


class VllmRenderer:
    """The part of vLLM's renderer that the tap uses. kind: Type of its prompts."""

    def __init__(self, kind: str = "token") -> None:
        self.tokenizer, self.kind = TOKENIZER, kind

    async def render_chat_async(
        self, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        prompts = [
            {"type": self.kind, "prompt_token_ids": rendered(c).ids, "prompt": "text", **more}
            for c in conversations
        ]
        return list(conversations), prompts


def tapped(given: PriorTokens | None, renderer: VllmRenderer, *conversations: Any) -> Any:
    PromptTap(renderer, lambda: given, "f00d")
    asked = renderer.render_chat_async(
        conversations, ChatParams({"tools": None}), TokenizeParams(), cache_salt="s"
    )
    return asyncio.run(asked)


def given_tokens(family: str = "qwen3", tokenizer: str | None = "f00d") -> PriorTokens:
    given = PriorTokens()
    given.prior = prior(PROMPT, SAMPLED)._replace(renderer=family, tokenizer=tokenizer)
    return given


def test_a_prompt_is_replaced_once() -> None:
    given, renderer = given_tokens(), VllmRenderer()
    conversations, (prompt,) = tapped(given, renderer, NEXT)
    assert conversations == [NEXT] and given.prior is None and given.reason is None
    ids = prompt.pop("prompt_token_ids")
    assert ids[: len(PROMPT) + len(SAMPLED)] == [*PROMPT, *SAMPLED]
    assert prompt == {"type": "token", "cache_salt": "s"}
    _, (again,) = asyncio.run(renderer.render_chat_async([NEXT], ChatParams()))
    assert again["prompt_token_ids"] == rendered(NEXT).ids


@pytest.mark.parametrize(
    ("given", "kind", "conversations", "reason"),
    [
        (None, "token", [NEXT], None),
        (PriorTokens(), "token", [NEXT], None),
        (given_tokens(), "multimodal", [NEXT], MEDIA),
        (given_tokens(), "token", [NEXT, NEXT], NO_BRIDGE),
        (given_tokens(tokenizer="beef"), "token", [NEXT], TOKENIZER_CHANGED),
        (given_tokens("llama-3"), "token", [NEXT], UNKNOWN_TEMPLATE),
        (given_tokens("no-such-family"), "token", [NEXT], UNKNOWN_TEMPLATE),
    ],
)
def test_other_prompts_stay_as_rendered(
    given: PriorTokens | None, kind: str, conversations: list[Any], reason: str | None
) -> None:
    _, prompts = tapped(given, VllmRenderer(kind), *conversations)
    assert [p["prompt_token_ids"] for p in prompts] == [rendered(c).ids for c in conversations]
    assert given is None or (given.prior, given.reason) == (None, reason)


# ---------------------------------------------------------------- in the body of a request

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(pack_ids)
TEXT = st.text("0123456789abcdef", max_size=4)
PRIOR = st.builds(
    Prior, st.sampled_from(["qwen3", "glm-5.1"]), IDS, IDS, st.none() | st.just(7), st.none() | TEXT
)


@given(PRIOR, st.sampled_from([{"a": 1}, {"a": {"b": [1, "}"]}}]))
def test_the_field_is_removed_from_the_body(given_ids: Prior, body: Json) -> None:
    whole = json.dumps(body | prior_fields(given_ids), separators=(",", ":")).encode()
    own, found = split_prior(whole)
    assert json.loads(own) == body and found == given_ids


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"a":1,"clawstream_prior":7}', b'{"a":1,"clawstream_prior":["q","@@"]}']
)
def test_a_body_without_ids_is_unchanged(body: bytes) -> None:
    assert split_prior(body) == (body, None)


def test_ids_are_packed() -> None:
    assert unpack_ids(prior(PROMPT, SAMPLED).prompt_ids) == PROMPT

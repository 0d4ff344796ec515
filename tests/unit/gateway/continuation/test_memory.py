"""The memory of replies as lists in, lists out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.continuation import history, memory
from clawstream.gateway.continuation.history import FIRST_TURN, UNREADABLE
from clawstream.gateway.continuation.memory import (
    ENGINE,
    HISTORY_EDITED,
    NO_MEMORY,
    OVERHEAD_BYTES,
    ContinuationMemory,
    Lookup,
)
from clawstream.rollout.vllm_plugin import continuation
from clawstream.schemas.records import Continuation, Step
from clawstream.schemas.tokens import pack_ids

Json = dict[str, Any]
REF = TrajectoryRef("run", "t1", None, None)
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str) -> Json:
    return {"role": "assistant", "content": text}


def step(
    lookup: Lookup, name: str, prompt: list[int], sampled: list[int], said: str, **more: Any
) -> Step:
    packed = pack_ids(prompt)
    return Step(
        **{
            "step_id": name, "run_id": "run", "trajectory_key": "t1", "call_id": "c",
            "choice_index": 0, "protocol": "openai.chat", "model": "m", "status": "ok",
            "streamed": False, "request_json": b"{}",
            "response_json": orjson.dumps(assistant(said)), "prompt_token_ids": packed,
            "response_token_ids": pack_ids(sampled), "gateway_id": "g", "received_at": 0,
            "finished_at": 0, "continuation": lookup.outcome(packed, None),
        } | more
    )  # fmt: skip


def ask(
    memory: ContinuationMemory, *messages: Json, ref: TrajectoryRef = REF, **body: Any
) -> Lookup:
    return memory.look_up(ref, {"messages": [*messages], **body})


@given(st.lists(st.tuples(IDS, IDS, st.booleans()), min_size=1, max_size=6))
def test_the_tokens_of_a_conversation_are_found_whatever_the_engine_kept(
    turns: list[tuple[list[int], list[int], bool]],
) -> None:
    memory, messages = ContinuationMemory(1 << 20), list[Json]()
    before: list[int] = []
    for at, (new, sampled, exact) in enumerate(turns):
        messages.append(user(f"question {at}"))
        lookup = ask(memory, *messages)
        if at:
            prior = lookup.prior("qwen3", 9)
            assert prior is not None and (prior.renderer, prior.limit) == ("qwen3", 9)
            assert prior.prompt_ids + prior.sampled_ids == pack_ids(before)
        else:
            assert lookup.reason == FIRST_TURN and lookup.prior("qwen3", None) is None
        prompt = [*(before if exact else ()), *new]
        made = step(lookup, f"s{at}", prompt, sampled, f"answer {at}")
        assert made.continuation is not None
        if at and exact:
            assert made.continuation == Continuation(
                previous_step_id=f"s{at - 1}", kept_tokens=len(before)
            )
        memory.remember(lookup, made)
        before = [*prompt, *sampled]
        messages.append(assistant(f"answer {at}"))
    exact_bytes = sum(4 * len(s) + OVERHEAD_BYTES for _, s, _ in turns)
    if all(exact for _, _, exact in turns):  # each token is stored once
        assert memory.size == exact_bytes + sum(4 * len(new) for new, _, _ in turns)


def remembered(**more: Any) -> tuple[ContinuationMemory, Lookup]:
    memory = ContinuationMemory(1 << 20)
    lookup = ask(memory, user("q"), model="m")
    memory.remember(lookup, step(lookup, "s0", [1, 2], [3], "a", **more))
    return memory, ask(memory, user("q"), assistant("a"), user("why?"), model="m")


def test_what_the_engine_did_is_recorded() -> None:
    _, lookup = remembered()
    assert lookup.outcome(pack_ids([1, 2, 3, 9]), None) == Continuation(
        previous_step_id="s0", kept_tokens=3
    )
    # The rendered prompt may happen to keep the ids.
    assert lookup.outcome(pack_ids([1, 2, 3, 9]), "no_bridge") == Continuation(
        previous_step_id="s0", kept_tokens=3, reason="no_bridge"
    )
    assert lookup.outcome(pack_ids([1, 2, 9]), "media").reason == "media"
    assert lookup.outcome(pack_ids([1, 2, 9]), None).reason == ENGINE
    assert lookup.outcome(None, None) == Continuation(previous_step_id="s0", reason=ENGINE)


@pytest.mark.parametrize(
    "incomplete",
    [
        {"status": "aborted"},
        {"tokens_absent_reason": "unread reply: x"},
        {"response_token_ids": None},
        {"response_token_ids": b""},
        {"response_json": b"null"},
    ],
)
def test_an_incomplete_reply_is_not_continued(incomplete: Json) -> None:
    _, lookup = remembered(**incomplete)
    assert lookup.reason == NO_MEMORY


def test_reasons_of_a_request_that_continues_nothing() -> None:
    memory, _ = remembered()
    turns = user("q"), assistant("a"), user("why?")
    assert ask(memory, user("Q"), *turns[1:], model="m").reason == HISTORY_EDITED
    assert ask(memory, *turns, model="m", tools=[{}]).reason == "tools_changed"
    other = TrajectoryRef("other-run", "t1", None, None)
    assert ask(memory, *turns, model="m", ref=other).reason == NO_MEMORY
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    lookup = ask(memory, user("q"), {"role": "user", "content": deep})
    assert lookup.reason == UNREADABLE
    memory.remember(lookup, step(lookup, "s1", [1], [2], "a"))  # nothing to find it by


def test_conversations_with_equal_messages_and_other_tools_are_apart() -> None:
    memory = ContinuationMemory(1 << 20)
    for name, tools in (("s0", [{"name": "f"}]), ("s1", [{"name": "g"}])):
        lookup = ask(memory, user("q"), tools=tools)
        memory.remember(lookup, step(lookup, name, [1], [2], "a"))
    found = ask(memory, user("q"), assistant("a"), user("?"), tools=[{"name": "f"}])
    assert found.reply is not None and found.reply.step_id == "s0"


def test_a_choice_and_a_repeated_call_are_found_by_their_words() -> None:
    memory = ContinuationMemory(1 << 20)
    lookup = ask(memory, user("q"))
    for name, sampled, said in (("s0", [5], "a"), ("s1", [6], "b"), ("s2", [7], "a")):
        memory.remember(lookup, step(lookup, name, [1], sampled, said))
    found = [ask(memory, user("q"), assistant(said), user("?")).reply for said in "ab"]
    assert [reply and reply.step_id for reply in found] == ["s2", "s1"]


def test_the_trajectory_used_least_recently_is_forgotten() -> None:
    memory = ContinuationMemory(2 * (OVERHEAD_BYTES + 8))
    refs = [TrajectoryRef("run", f"t{i}", None, None) for i in range(3)]
    for ref in refs[:2]:
        lookup = ask(memory, user("q"), ref=ref)
        memory.remember(lookup, step(lookup, "s", [1], [2], "a"))
    turns = user("q"), assistant("a"), user("?")
    assert ask(memory, *turns, ref=refs[0]).reply is not None
    lookup = ask(memory, user("q"), ref=refs[2])
    memory.remember(lookup, step(lookup, "s", [1], [2], "a"))
    assert [ask(memory, *turns, ref=ref).reason for ref in refs] == [None, NO_MEMORY, None]
    assert memory.size == 2 * (OVERHEAD_BYTES + 8)


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_reply_forgotten_during_a_call_is_not_kept_as_a_parent(begun_anew: bool) -> None:
    memory = ContinuationMemory(2 * (OVERHEAD_BYTES + 20))
    first = ask(memory, user("q"))
    memory.remember(first, step(first, "s0", [1], [2], "a"))
    turns = user("q"), assistant("a"), user("?")
    lookup = ask(memory, *turns)
    continued = step(lookup, "s1", [1, 2, 3], [4], "b")
    other = ask(memory, user("q"), ref=TrajectoryRef("run", "t2", None, None))
    for said in "ab":
        memory.remember(other, step(other, "s", [1], [2], said))
    if begun_anew:
        memory.remember(first, step(first, "s2", [1], [2], "c"))
    memory.remember(lookup, continued)
    found = ask(memory, *turns, assistant("b"), user("?")).reply
    assert found is not None and found.step_id == "s1" and found.parent is None


def test_the_page_explains_every_reason() -> None:
    modules = (history, memory, continuation)
    reasons = {
        value
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and value != history.BILLING
    } | {f"{name}_changed" for name in history.Context._fields}
    page = (Path(__file__).parents[4] / "docs" / "exact-continuation.md").read_text()
    explained = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(set(explained) - set(Continuation.__slots__)) == sorted(reasons)

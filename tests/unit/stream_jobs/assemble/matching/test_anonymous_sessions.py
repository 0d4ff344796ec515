"""Anonymous sessions: assemble assigns calls that name no trajectory to one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.assemble import (
    ANONYMOUS_KEY,
    CODEC,
    LIMITS,
    InMemoryPartition,
    chat_step,
    content,
    curation,
    reward,
    session,
)
from support.examples import examples

from clawstream.schemas.conversation import RecordedRequest
from clawstream.schemas.records import Step, Tick
from clawstream.schemas.tokens import pack_ids
from clawstream.stream_jobs.assemble.changelog import ChangelogReader
from clawstream.stream_jobs.assemble.matching.anonymous_sessions import (
    STALE_MAX,
    PrefixIndex,
    StepMatches,
    place_step,
)
from clawstream.stream_jobs.assemble.state.steps import OpenSteps
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS

TASK = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Fix the bug."},
]
QUIET = replace(LIMITS, anonymous_inactivity=300)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(call_id: str, name: str = "ls", arguments: str = '{"path": "."}') -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def split(w: InMemoryPartition) -> list[list[str]]:
    """Close all trajectories and return the step numbers of each trajectory, by index."""
    w.feed((STEPS, 10_000_000, Tick(partition=0)))
    return sorted(
        [s.step_id.rpartition("~")[2].partition(".")[0] for s in t.steps]
        for t in w.trajectories.values()
    )


def fed(*steps: Step) -> InMemoryPartition:
    return InMemoryPartition(QUIET).feed(*[(STEPS, i, s) for i, s in enumerate(steps)])


def test_a_conversation_is_one_trajectory_named_after_its_first_call() -> None:
    w = fed(chat_step(0, TASK, said("a")), chat_step(1, [*TASK, said("a"), user("u")], said("b")))
    assert split(w) == [["C0", "C1"]]
    (t,) = w.trajectories.values()
    assert (t.trajectory_id, t.trajectory_key, t.group_id) == (
        f"{ANONYMOUS_KEY}~C0",
        ANONYMOUS_KEY,
        f"{ANONYMOUS_KEY}~C0",
    )
    assert (t.outcome, t.reason) == ("completed", "inactive")
    assert [(s.step_id, s.parent, s.drift) for s in t.steps] == [
        (f"{ANONYMOUS_KEY}~C0.0", None, "root"),
        (f"{ANONYMOUS_KEY}~C1.0", 0, "clean"),
    ]
    assert w.last(t.trajectory_id).trajectory_key == ANONYMOUS_KEY


def test_rollouts_of_one_prompt_side_by_side_stay_apart() -> None:
    first = [chat_step(i, TASK, said(f"try {i}")) for i in range(8)]
    second = [
        chat_step(10 + i, [*TASK, said(f"try {i}"), user("go on")], said("ok"))
        for i in reversed(range(8))
    ]
    assert split(fed(*first, *second)) == sorted([f"C{i}", f"C{10 + i}"] for i in range(8))


def test_equal_replies_are_gone_on_from_once_each() -> None:
    w = fed(
        *[chat_step(i, TASK, said("same")) for i in range(3)],
        *[chat_step(10 + i, [*TASK, said("same"), user(f"u{i}")], said("x")) for i in range(3)],
    )
    assert split(w) == [["C0", "C10"], ["C1", "C11"], ["C2", "C12"]]


def test_a_transient_message_that_always_moves_to_the_end_does_not_split() -> None:
    """In openclaw, request n+1 does not extend request n, and call ids lose their underscore."""
    note = user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>")
    result = {"role": "tool", "tool_call_id": "call78f8", "content": "a.py"}
    back = called("call78f8", arguments='{"path":"."}')
    w = fed(
        chat_step(0, [*TASK, note], called("call_78f8")),
        chat_step(1, [*TASK, note], called("call_99ab")),
        chat_step(2, [*TASK, back, result, note], said("done")),
    )
    assert split(w) == [["C0", "C2"], ["C1"]]
    assert [s.drift for s in w.trajectories[f"{ANONYMOUS_KEY}~C0"].steps] == ["root", "root"]


def test_history_rendered_otherwise_than_it_was_sampled_does_not_split() -> None:
    """The text of the history equals the reply, but its tokens differ.

    A chat template can drop the reasoning or format calls in its own way.
    """
    thought = {"content": "4", "reasoning_content": "two and two"}
    sampled = pack_ids([7, 7, 7, 2000])
    # Step 2 belongs to another conversation, whose first call is not on the topic.
    w = fed(
        chat_step(0, TASK, thought, response_token_ids=sampled),
        chat_step(1, [*TASK, said("4"), user("sure?")], said("yes")),
        chat_step(2, [*TASK, said("5"), user("sure?")], said("no")),
    )
    assert split(w) == [["C0", "C1"], ["C2"]]
    steps = w.trajectories[f"{ANONYMOUS_KEY}~C0"].steps
    assert [(s.drift, s.parent) for s in steps] == [("root", None), ("realigned", 0)]


def test_a_history_that_was_cut_is_found_by_its_last_call() -> None:
    w = fed(
        chat_step(0, TASK, called("call_1")),
        chat_step(1, [TASK[1], called("call_1"), user("r")], called("call_2")),
    )
    w.feed((STEPS, 5, chat_step(2, [TASK[1], called("call_2"), user("r")], said("done"))))
    assert split(w) == [["C0", "C1", "C2"]]


def repeated(call_id: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a call and its result as smolagents sends them back: model text and user text."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "search", "arguments": arguments}}
    ]
    return [
        {"role": "assistant", "content": [{"type": "text", "text": f"Calling tools:\n{calls}"}]},
        {"role": "user", "content": [{"type": "text", "text": f"Observation:\nfound {arguments}"}]},
    ]


def test_calls_that_come_back_as_text_do_not_split() -> None:
    """In smolagents, each of four concurrent runs is one trajectory, including its call ids."""
    steps, histories = [], [list(TASK) for _ in range(4)]
    for turn in range(3):
        for run, history in enumerate(histories):
            call_id = f"call_{run}{turn}abc"
            steps.append(
                chat_step(10 * run + turn, history, called(call_id, "search", '{"q": "x"}'))
            )
            history += repeated(call_id, {"q": "x"})
    assert split(fed(*steps)) == sorted(
        [f"C{10 * run + turn}" for turn in range(3)] for run in range(4)
    )


def test_ids_that_are_counted_in_each_conversation_are_told_apart_by_the_messages() -> None:
    tasks = [[*TASK, user(f"part {run}")] for run in range(3)]
    first = [chat_step(run, task, called("search:0", "search")) for run, task in enumerate(tasks)]
    second = [
        chat_step(10 + run, [*task, *repeated("search:0", {"q": "x"})], said("done"))
        for run, task in enumerate(tasks)
    ]
    assert split(fed(*first, *reversed(second))) == [["C0", "C10"], ["C1", "C11"], ["C2", "C12"]]


def test_a_reply_in_another_form_is_followed_only_where_nothing_else_fits() -> None:
    rewritten = [*TASK, said("in short"), user("go on")]
    w = fed(chat_step(0, TASK, said("a")), chat_step(1, rewritten, said("b")))
    # Another run: the first step already has a successor.
    w.feed((STEPS, 2, chat_step(2, rewritten, said("c"))))
    assert split(w) == [["C0", "C1"], ["C2"]]
    with_its_words = [*TASK, said("I had said: a"), user("go on")]
    w = fed(*[chat_step(i, with_its_words if i else TASK, said("a")) for i in range(3)])
    assert split(w) == [["C0", "C1", "C2"]], "a branch, as after an equal reply"
    two = fed(
        *[chat_step(i, TASK, said(f"try {i}")) for i in range(2)],
        chat_step(2, rewritten, said("b")),
    )
    assert split(two) == [["C0"], ["C1"], ["C2"]], "either could be meant"


def test_forms_of_messages_that_agents_change_between_calls_are_the_same_beginning() -> None:
    listed = [
        TASK[0],
        {
            **TASK[1],
            "content": [
                {"type": "text", "text": TASK[1]["content"], "cache_control": {"type": "ephemeral"}}
            ],
        },
    ]
    w = fed(
        chat_step(0, listed, said("a")),
        chat_step(1, [*TASK, said("otherwise"), user("go on")], said("b")),
    )
    assert split(w) == [["C0", "C1"]]


def test_a_step_of_an_unreadable_history_is_looked_up_and_not_searched() -> None:
    """A step uses the indexes and scans no other trajectory.

    Where its agent rewrites a reply, those with the same request are compared.
    """
    w = fed(*[chat_step(i, TASK, said(f"try {i:04}")) for i in range(200)])
    (index,) = w.state.session_indexes.values()
    looked: list[str] = []

    def steps_of(trajectory: str) -> OpenSteps:
        looked.append(trajectory)
        return w.state.opened["r", trajectory].steps

    unknown = chat_step(900, [*TASK[1:], said("anew"), user("u")], said("x"))
    assert (
        place_step(
            index, steps_of, "C900.0", unknown, RecordedRequest(unknown.request_json)
        ).trajectory
        is None
    )
    anew = [*TASK, said("try 0150"), user("u")]
    found = chat_step(901, anew, said("x"), request_json=b'{"prompt": "..."}')
    assert (
        place_step(index, steps_of, "C901.0", found, RecordedRequest(found.request_json)).trajectory
        == f"{ANONYMOUS_KEY}~C150"
    )
    assert looked == [] and len(index.prefixes[None].lengths) == 1
    longer = chat_step(902, [*TASK, said("try 0150!"), user("u")], said("x"))
    assert (
        place_step(
            index, steps_of, "C902.0", longer, RecordedRequest(longer.request_json)
        ).trajectory
        == f"{ANONYMOUS_KEY}~C150"
    )
    assert len(looked) <= 2 * 200 + 2


def test_without_a_readable_request_tokens_tell() -> None:
    w = fed(
        chat_step(0, TASK, said("a")),
        chat_step(1, [*TASK, said("a"), user("u")], said("b"), request_json=b'{"prompt": "..."}'),
        chat_step(2, TASK, said("c"), request_json=b"not json"),
    )
    assert split(w) == [["C0", "C1"], ["C2"]]


def test_text_alone_tells_too() -> None:
    w = fed(
        chat_step(0, TASK, said("a"), tokens=False),
        chat_step(1, TASK, said("b"), tokens=False),
        chat_step(2, [*TASK, said(" a "), user("u")], said("c"), tokens=False),
    )
    assert split(w) == [["C0", "C2"], ["C1"]]


def test_choices_of_a_call_are_siblings_in_one_trajectory() -> None:
    more = {"call_id": f"{ANONYMOUS_KEY}~C0", "choice_index": 1, "step_id": f"{ANONYMOUS_KEY}~C0.1"}
    w = fed(
        chat_step(0, TASK, said("a")),
        chat_step(0, TASK, said("b"), **more),
        chat_step(2, [*TASK, said("b"), user("u")], said("c")),
    )
    assert split(w) == [["C0", "C0", "C2"]]
    (t,) = w.trajectories.values()
    assert [(s.step_id[-4:], s.parent, s.drift) for s in t.steps] == [
        ("C0.0", None, "root"), ("C0.1", None, "root"), ("C2.0", 1, "clean"),
    ]  # fmt: skip


def test_a_step_past_the_limit_closes_first_and_begins_the_next() -> None:
    w = InMemoryPartition(QUIET).feed((STEPS, 0, chat_step(0, TASK, said("a"))))
    w.feed((STEPS, 300, chat_step(1, [*TASK, said("a"), user("u")], said("b"))))
    w.feed(
        (STEPS, 601, chat_step(2, [*TASK, said("a"), user("u"), said("b"), user("v")], said("c")))
    )
    assert [(t, w.trajectories[t].closed_at) for t in w.trajectories] == [
        (f"{ANONYMOUS_KEY}~C0", 601)
    ]
    w.feed((STEPS, 602, chat_step(0, TASK, said("a"))))  # delivered again from a spool
    assert not w.marks and split(w) == [["C0", "C1"], ["C2"]]


def test_a_choice_that_comes_after_the_closing_is_late() -> None:
    more = {"choice_index": 1, "step_id": f"{ANONYMOUS_KEY}~C0.1"}
    w = fed(chat_step(0, TASK, said("a")))
    w.feed((STEPS, 400, Tick(partition=0)), (STEPS, 401, chat_step(0, TASK, said("b"), **more)))
    assert [(m.key, m.step_id, m.kind) for m in w.marks] == [
        (("r", f"{ANONYMOUS_KEY}~C0"), f"{ANONYMOUS_KEY}~C0.1", "late")
    ]


def test_rewards_marks_and_completions_find_the_trajectory_of_the_step_they_name() -> None:
    # The first reward waits; it belongs to the trajectory that has step 1.
    w = InMemoryPartition(QUIET).feed(
        (
            REWARDS,
            0,
            replace(reward(ANONYMOUS_KEY, 0.9, 1), trajectory_id=ANONYMOUS_KEY),
        ),
        (STEPS, 0, chat_step(0, TASK, said("a"))),
        (STEPS, 0, chat_step(1, TASK, said("b"))),
        (REWARDS, 1, reward(ANONYMOUS_KEY, 0.5, 0)),
        (REWARDS, 1, curation(ANONYMOUS_KEY, "c", 0, quality=0.25)),
        (STEPS, 1, session(ANONYMOUS_KEY, "failed", step_id=f"{ANONYMOUS_KEY}~C1.0")),
        (STEPS, 1, session(ANONYMOUS_KEY, "failed", step_id=f"{ANONYMOUS_KEY}~C1.0")),
    )
    one = w.last(f"{ANONYMOUS_KEY}~C1")
    assert (one.outcome, [(r.value, r.step_id) for r in one.rewards]) == ("failed", [(0.9, None)])
    assert len(w.trajectories) == 1
    w.feed((STEPS, 400, Tick(partition=0)))
    w.feed(
        (
            REWARDS,
            400,
            replace(reward(ANONYMOUS_KEY, 0.7, name="late"), trajectory_id=f"{ANONYMOUS_KEY}~C0"),
        )
    )
    zero = w.last(f"{ANONYMOUS_KEY}~C0")
    assert [(r.name, r.value, r.step_id) for r in zero.rewards] == [
        ("a", 0.5, f"{ANONYMOUS_KEY}~C0.0"),
        ("late", 0.7, None),
    ]
    assert zero.steps[0].quality == 0.25
    assert not w.dead_letters


def test_what_names_no_step_of_an_anonymous_session_is_dead_lettered() -> None:
    w = InMemoryPartition(QUIET).feed(
        (STEPS, 0, chat_step(0, TASK, said("a"))),
        (STEPS, 0, session(ANONYMOUS_KEY, "completed")),
        (STEPS, 0, session(ANONYMOUS_KEY, "opened", step_id=f"{ANONYMOUS_KEY}~C0.0")),
        (REWARDS, 0, reward(ANONYMOUS_KEY)),
        (REWARDS, 0, replace(reward(ANONYMOUS_KEY), trajectory_id="other")),
        (REWARDS, 0, reward(ANONYMOUS_KEY, 1.0, 7)),
        (STEPS, 0, session(ANONYMOUS_KEY, "completed", "e", step_id=f"{ANONYMOUS_KEY}~C8.0")),
        (STEPS, 501, Tick(partition=0)),
    )
    assert [(b.source, b.offset, b.reason) for b in w.dead_letters] == [
        (STEPS, 1, "invalid"), (STEPS, 2, "invalid"), (REWARDS, 0, "invalid"),
        (REWARDS, 1, "invalid"),
        (STEPS, 3, "unknown_target"), (REWARDS, 2, "unknown_target"),
    ]  # fmt: skip


def test_a_completion_that_came_before_its_step_closes_its_trajectory_when_the_wait_is_over() -> (
    None
):
    w = InMemoryPartition(replace(QUIET, anonymous_inactivity=900)).feed(
        (STEPS, 0, session(ANONYMOUS_KEY, "failed", step_id=f"{ANONYMOUS_KEY}~C0.0")),
        (STEPS, 100, chat_step(0, TASK, said("a"))),
        (STEPS, 501, Tick(partition=0)),
    )
    assert [(t.trajectory_id, t.outcome) for t in w.trajectories.values()] == [
        (f"{ANONYMOUS_KEY}~C0", "failed")
    ]


def test_runs_do_not_meet_in_an_anonymous_session() -> None:
    other = replace(chat_step(1, [*TASK, said("a"), user("u")], said("b")), run_id="q")
    assert split(fed(chat_step(0, TASK, said("a")), other)) == [["C0"], ["C1"]]


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    w = fed(chat_step(0, TASK, said("a"), status="aborted", idempotency_key="i"))
    w.fold.limits = replace(QUIET, closed_horizon=2000)
    w.feed((REWARDS, 0, Tick(partition=0)), (STEPS, 400, Tick(partition=0)))
    assert w.trajectories and w.state.session_indexes and w.state.closed
    (index,) = w.state.session_indexes.values()
    assert not (index.matches or index.prefixes or index.opened or index.failed)
    w.feed((REWARDS, 9000, Tick(partition=0)), (STEPS, 9000, Tick(partition=0)))
    assert not (w.state.session_indexes or w.state.anonymous_open or w.state.closed)


@pytest.mark.parametrize("stored", [False, True])
def test_the_index_is_the_same_when_rebuilt(stored: bool) -> None:
    w = fed(
        *[chat_step(i, TASK, called(f"c{i}")) for i in range(3)],
        chat_step(3, TASK, said(""), status="aborted"),
    )
    w.feed((STEPS, 5, session(ANONYMOUS_KEY, "completed", step_id=f"{ANONYMOUS_KEY}~C1.0")))
    w.feed((STEPS, 6, chat_step(4, [*TASK, called("c0"), user("u")], said("x"))))
    before = w.state.session_indexes
    if stored:
        w.snapshot()
    w.decide([])
    log = ChangelogReader()
    for offset, value in enumerate(w.log, 1):
        log.read(offset, CODEC.decode(value), len(value))
    assert log.state.anonymous_open.keys() == w.state.anonymous_open.keys()
    for index, again in zip(before.values(), log.state.session_indexes.values(), strict=True):
        assert (again.calls, again.failed, again.opened.keys()) == (
            index.calls,
            index.failed,
            index.opened.keys(),
        )
        assert (again.matches, again.prefixes) == (index.matches, index.prefixes)


@pytest.mark.slow
def test_a_prompt_that_is_asked_for_ever_leaves_nothing_behind() -> None:
    """Bound the heaps of a prompt that is sent forever and whose replies have no successor.

    Without a successor, no lookup removes closed steps from the top of a heap. The selected steps
    stay the same.
    """
    chosen = []
    for stored in (False, True):
        w = InMemoryPartition(replace(QUIET, anonymous_inactivity=30, trajectory_timeout=10_000))
        w.feed(*((STEPS, i, chat_step(i, TASK, said("same"))) for i in range(400)))
        w.feed((STEPS, 400, chat_step(400, [*TASK, said("same"), user("u")], said("b"))))
        if stored:
            w.snapshot()
            w.crash()
        (index,) = w.state.session_indexes.values()
        heaps = [
            *(found for lookup, found in index.matches.items() if lookup[0] == "reply"),
            *(h for prefixes in index.prefixes.values() for h in _places(prefixes)),
        ]
        assert len(heaps) == 6 and max(len(h.offsets) for h in heaps) == 30
        assert all(len(h.unclaimed) <= 2 * len(h.offsets) + STALE_MAX for h in heaps)
        w.feed(
            *(
                (STEPS, 401, chat_step(401 + i, [*TASK, said("same"), user(f"{i}")], said("b")))
                for i in range(10)
            )
        )
        chosen.append({key: [s.step_suffix for s in t.steps] for key, t in w.state.opened.items()})
    assert chosen[0] == chosen[1]
    assert sum(len(tails) == 2 for tails in chosen[0].values()) == 11


def _places(ends: PrefixIndex) -> list[StepMatches]:
    return [places for by_hash in ends.by_length.values() for places in by_hash.values()]


@pytest.mark.slow
def test_among_equal_replies_each_is_gone_on_from_once_at_no_cost() -> None:
    """Compare the function calls per step of the second turns of 100 and 800 equal rollouts."""
    calls = {}
    for count in (100, 800):
        w = InMemoryPartition(
            replace(QUIET, anonymous_inactivity=10_000, trajectory_timeout=10_000)
        )
        w.feed(*((STEPS, i, chat_step(i, TASK, said("same"))) for i in range(count)))
        seconds = [
            chat_step(count + i, [*TASK, said("same"), user(f"u{i}")], said(f"b{i}"))
            for i in range(count)
        ]
        made = 0

        def profile(_frame: Any, event: str, _arg: Any) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            for at, step in enumerate(seconds):
                w.fold.record(STEPS, count + at, count, step.trajectory_key.encode(), step)
        finally:
            sys.setprofile(None)
        calls[count] = made / count
        assert [[s.step_suffix for s in t.steps] for t in w.state.opened.values()] == [
            [f"C{i}.0", f"C{count + i}.0"] for i in range(count)
        ]
    assert calls[800] < 1.1 * calls[100]


def conversation(number: int, turns: int, style: str, unique: bool) -> list[Step]:
    """Return the calls of one rollout.

    Args:
        style: how the agent and the engine treat the history.
        unique: whether the replies differ from those of other rollouts.
    """
    history: list[dict[str, Any]] = list(TASK)
    steps = []
    for turn in range(turns):
        text = f"reply {number if unique else 0}.{turn}"
        reply = called(f"call_{text}") if style == "tools" else said(text)
        more: dict[str, Any] = (
            {"response_token_ids": pack_ids([9, number])} if style == "drift" else {}
        )
        if style == "drift":
            more["response_logprobs"] = bytes(8)
        tail = [user("note")] if style == "transient" else []
        steps.append(
            chat_step(100 * number + turn, [*history, *tail], reply, tokens=style != "text", **more)
        )
        history += [reply, user(f"result {turn}")]
    return steps


@st.composite
def rollouts(draw: st.DrawFn, unique: bool = True) -> list[list[Step]]:
    styles = st.sampled_from(["clean", "tools", "transient", "drift", "text"])
    return [
        conversation(i + 1, draw(st.integers(1, 4)), draw(styles), unique)
        for i in range(draw(st.integers(1, 5)))
    ]


def woven(draw: Any, rows: Sequence[Sequence[Step]]) -> list[Step]:
    """Draw an interleaving that keeps the order within each row."""
    left = [list(row) for row in rows]
    out = []
    while left := [row for row in left if row]:
        out.append(left[draw(st.integers(0, len(left) - 1))].pop(0))
    return out


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(st.data())
def test_any_interleaving_with_duplicates_and_crashes_gives_the_same_split(
    data: st.DataObject,
) -> None:
    rows = data.draw(rollouts())
    log = woven(data.draw, rows)
    for _ in range(data.draw(st.integers(0, 3))):  # repeat some records at a later position
        at = data.draw(st.integers(0, len(log) - 1))
        log.insert(data.draw(st.integers(at + 1, len(log))), log[at])
    w, plain = InMemoryPartition(QUIET), fed(*[s for row in rows for s in row])
    for at, event in enumerate(log):
        w.decide([(STEPS, at, at, event)])
        moment = data.draw(st.sampled_from(["go on", "crash", "snapshot"]))
        if moment == "crash":
            w.crash()
        w.emit()
        if moment == "snapshot":
            w.snapshot()
    w.batch([(STEPS, len(log), 10_000_000, Tick(partition=0))])
    assert split(plain) == sorted([s.call_id.rpartition("~")[2] for s in row] for row in rows)
    trees = [
        {k: replace(t, opened_at=0, closed_at=0) for k, t in content(one)[0].items()}
        for one in (w, plain)
    ]
    assert trees[0] == trees[1]


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(st.data())
def test_rollouts_that_say_the_same_are_told_apart_by_number(data: st.DataObject) -> None:
    """A call continues any of several equal beginnings.

    No beginning is continued twice while another has no successor.
    """
    rows = data.draw(rollouts(unique=False).filter(lambda rows: len({len(r) for r in rows}) == 1))
    rows = [conversation(i + 1, len(row), "clean", False) for i, row in enumerate(rows)]
    found = split(fed(*woven(data.draw, rows)))
    assert [len(steps) for steps in found] == [len(row) for row in rows]

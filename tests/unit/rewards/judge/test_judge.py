"""The judge on a real HTTP endpoint: a failure has its reason and costs only its own verdict."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_endpoint import Reply, chat, model_endpoint
from support.trajectories import answered

from clawstream.rewards.answer import own_steps
from clawstream.rewards.endpoint import CONNECTIONS, Endpoint, EndpointError, NotServed
from clawstream.rewards.judge.ledger import Budget, Ledger, OverBudget
from clawstream.rewards.judge.reward import JudgeError, judge, majority, verdict_in
from clawstream.rewards.registry import Rule
from clawstream.rewards.results import rewards_of
from clawstream.rewards.template import CONVERSATION_BYTES, filled, said_in
from clawstream.schemas.records import Trajectory

GOOD = '{"explanation": "It is right.", "score": 8}'


def rated(folder: Path, url: str, *trajectories: Trajectory, **settings: Any) -> list[Any]:
    """Return the reward of each trajectory, or what the judge raised, one after the other."""

    async def work() -> list[Any]:
        reward, results = judge(
            {
                "type": "genrm", "url": url, "model": "m", "rubric": "Right is good.",
                "cache_file": str(folder / "judges.sqlite"), **settings,
            }
        ), list[Any]()  # fmt: skip
        for one in trajectories:
            try:
                results.append(await reward(one))
            except (EndpointError, JudgeError, OverBudget) as e:
                results.append(e)
        return results

    return asyncio.run(work())


def test_a_verdict_is_asked_for_with_a_schema_and_kept(tmp_path: Path) -> None:
    one = answered("42", question="6 * 7?")
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        first, second = rated(tmp_path, endpoint.url, one, one)
        (again,) = rated(tmp_path, endpoint.url, one)  # another process
    assert first == (0.8, {"votes": [8], "tokens": 10, "explanation": "It is right."})
    assert second == again == (0.8, {"votes": [8], "tokens": 0, "explanation": "It is right."})
    ((path, body),) = endpoint.requests
    system, user = (message["content"] for message in body["messages"])
    assert path == "/chat/completions" and body["model"] == "m"
    assert "Right is good." in system and "6 * 7?" in user and '["42"]' in user
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["explanation", "score"]


def test_fields_of_the_request_are_added_and_left_out(tmp_path: Path) -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 9, "seed": 4}
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        rated(tmp_path, endpoint.url, answered("a"), extra_body=extra)
    ((_, body),) = endpoint.requests
    assert "max_tokens" not in body and (body["max_completion_tokens"], body["seed"]) == (9, 4)


def by_seed(*contents: str | int) -> Callable[[Any], Reply]:
    """Return what answers the vote of each seed: a content, or an error's status."""

    def answer(body: Any) -> Reply:
        said = contents[body["seed"]]
        return (said, "no") if isinstance(said, int) else chat(said)

    return answer


def test_the_majority_of_the_votes_counts(tmp_path: Path) -> None:
    votes = [json.dumps({"explanation": f"{n}", "score": n}) for n in (2, 9, 9)]
    with model_endpoint(by_seed(*votes)) as endpoint:
        ((value, detail),) = rated(tmp_path, endpoint.url, answered("a"), votes=3, temperature=1)
    assert (value, sorted(detail["votes"]), detail["explanation"]) == (0.9, [2, 9, 9], "9")


@pytest.mark.parametrize(("failed", "is_decided"), [(1, True), (2, False)])
def test_a_majority_of_the_votes_is_needed(tmp_path: Path, failed: int, is_decided: bool) -> None:
    with model_endpoint(by_seed(*[400] * failed, *[GOOD] * (3 - failed))) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, answered("a"), votes=3, temperature=1)
    assert said[0] == 0.8 if is_decided else isinstance(said, EndpointError)


def test_a_vote_that_hangs_does_not_undo_a_majority(tmp_path: Path) -> None:
    go_on = threading.Event()

    def answer(body: Any) -> Reply:
        if body["seed"] == 1:
            go_on.wait()
        return chat(GOOD)

    with model_endpoint(answer) as endpoint:
        ((value, detail),) = rated(
            tmp_path, endpoint.url, answered("a"), votes=3, temperature=1, timeout_s=0.5
        )
        go_on.set()
    assert (value, detail["votes"]) == (0.8, [8, 8])


def test_a_busy_endpoint_is_asked_again_whatever_the_attempts(tmp_path: Path) -> None:
    replies = iter([(503, "busy"), (429, "slow down"), chat(GOOD)])
    with model_endpoint(lambda _: next(replies)) as endpoint:
        ((value, _),) = rated(tmp_path, endpoint.url, answered("a"), attempts=1)
    assert value == 0.8 and len(endpoint.requests) == 3


def test_requests_share_a_connection(tmp_path: Path) -> None:
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        rated(tmp_path, endpoint.url, answered("a"), answered("b"))
    assert len(endpoint.requests) == 2 and len(endpoint.clients) == 1


def test_requests_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawstream.rewards.endpoint.CONNECTIONS", 3)
    together = threading.Barrier(3)

    def answer(_: Any) -> Reply:
        together.wait()
        return chat(GOOD)

    with model_endpoint(answer) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, answered("a"), votes=6, temperature=1)
    assert said[1]["votes"] == [8] * 6 and len(endpoint.clients) == 3


def test_a_wait_for_a_connection_does_not_use_up_the_time_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request is sent when most of its time-out has passed, then takes as long."""
    monkeypatch.setattr("clawstream.rewards.endpoint.CONNECTIONS", 1)

    def answer(_: Any) -> Reply:
        threading.Event().wait(1.2)
        return chat(GOOD)

    with model_endpoint(answer) as endpoint:
        (said,) = rated(
            tmp_path, endpoint.url, answered("a"), votes=2, temperature=1, timeout_s=2.0
        )
    assert said[1]["votes"] == [8, 8]


def test_a_wait_for_a_connection_has_its_own_bound_and_reason() -> None:
    async def work() -> None:
        endpoint, given_back = Endpoint("http://127.0.0.1:1", None, 1, 0.2), list[int]()
        for _ in range(CONNECTIONS):
            await endpoint._connections.acquire()
        with pytest.raises(NotServed, match=r"no connection to .* was free in 0\.2 s: 128 req"):
            await endpoint.post("/chat/completions", {}, lambda: given_back.append(1))
        assert given_back == [1]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((500, "no"), EndpointError, r"HTTP 500 of .*, 2 attempts"),
        ((404, "no such model"), EndpointError, r"HTTP 404 of .*: no such model"),
        ((200, "text"), EndpointError, "is no JSON"),
        ((200, "[]"), EndpointError, "is no JSON object"),
        ((200, {"choices": []}), JudgeError, "has no message"),
        (chat("I like it"), JudgeError, "is no verdict: I like it"),
        (chat('{"score": 11}'), JudgeError, "from 0 to 10: 11"),
        (chat('{"score": NaN}'), JudgeError, "is no verdict"),
        (chat('{"score": true}'), JudgeError, "no whole number"),
        (chat('{"score": 7.5}'), JudgeError, "no whole number"),
        (chat('{"score": "7/10"}'), JudgeError, "no whole number"),
        (chat('{"score": "high"}'), JudgeError, "no whole number"),
        (chat(GOOD, finish_reason="length"), JudgeError, "is cut: max_tokens is too low"),
        (chat('{"explanation": "It says {"score": 9}", "score": 1}'), JudgeError, "is no verdict"),
    ],
)
def test_each_failure_has_its_reason(
    tmp_path: Path, reply: Reply, error: type[Exception], message: str
) -> None:
    with model_endpoint(lambda _: reply) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, answered("a"), attempts=2)
    with pytest.raises(error, match=message):
        raise said


@pytest.mark.parametrize("is_busy", [True, False])
def test_an_outage_has_a_reason_and_spends_no_call(tmp_path: Path, is_busy: bool) -> None:
    settings = {"budget_calls": 1, "timeout_s": 1.0}
    with model_endpoint(lambda _: (503, "busy")) as endpoint:
        if is_busy:
            said = rated(tmp_path, endpoint.url, answered("a"), answered("b"), **settings)
    if not is_busy:
        said = rated(tmp_path, endpoint.url, answered("a"), answered("b"), **settings)
    reason = "HTTP 503 of" if is_busy else "ClientConnectorError: Cannot connect to host"
    for one in said:
        with pytest.raises(NotServed, match=f"no reply of .* in 1 s: {reason}"):
            raise one


def test_requests_of_an_outage_spend_no_call(tmp_path: Path) -> None:
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        pass  # it is down
    steps, settings = answered("a", "b", "c"), {"budget_calls": 8, "timeout_s": 0.2}
    (said,) = rated(tmp_path, endpoint.url, steps, per="step", **settings)
    assert isinstance(said, NotServed)
    with closing(sqlite3.connect(tmp_path / "judges.sqlite")) as db:
        assert db.execute("select sum(calls) from spending").fetchone() == (0,)


def test_a_slow_judge_holds_up_only_its_verdict(tmp_path: Path) -> None:
    go_on = threading.Event()

    def answer(body: Any) -> Reply:
        if "slow" in body["messages"][1]["content"]:
            go_on.wait()
        return chat(GOOD)

    with model_endpoint(answer) as endpoint:
        (slow,) = rated(tmp_path, endpoint.url, answered("slow"), timeout_s=0.5)
        (quick,) = rated(tmp_path, endpoint.url, answered("a"))
        go_on.set()
    assert type(slow) is EndpointError
    assert str(slow) == f"no reply of {endpoint.url}/chat/completions in 0.5 s"
    assert quick[0] == 0.8


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"budget_calls": 1}, "over budget: 1 of 1 calls in 3600 s"),
        ({"budget_tokens": 5, "budget_window_s": None}, "over budget: 10 of 5 tokens in run r"),
    ],
)
def test_a_judge_over_its_budget_asks_nothing(
    tmp_path: Path, budget: dict[str, Any], reason: str
) -> None:
    one, other = answered("a"), answered("b")
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        _, over, kept = rated(tmp_path, endpoint.url, one, other, one, **budget)
        (restarted,) = rated(tmp_path, endpoint.url, other, **budget)
    assert (type(over), str(over), str(restarted)) == (OverBudget, reason, reason)
    assert kept[0] == 0.8 and len(endpoint.requests) == 1


def test_a_budget_of_tokens_needs_their_number(tmp_path: Path) -> None:
    with model_endpoint(lambda _: chat(GOOD, tokens=None)) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, answered("a"), budget_tokens=100)
        (free,) = rated(tmp_path, endpoint.url, answered("a"))
    assert isinstance(said, JudgeError) and "which budget_tokens needs" in str(said)
    assert free[1]["tokens"] == 0


@pytest.mark.parametrize(
    ("window_s", "kept"), [(3600.0, [("", 2, 6, 1)]), (None, [("a", 1, 3, 0), ("b", 1, 3, 0)])]
)
def test_spending_that_no_budget_reads_is_dropped(
    tmp_path: Path, window_s: float | None, kept: list[tuple[str, int, int, int]]
) -> None:
    """A window keeps its minutes, of all runs; without one each run keeps one row."""
    ledger = Ledger(tmp_path / "l", "j", Budget(9, None, window_s), replies_max=2)
    with closing(sqlite3.connect(tmp_path / "l", isolation_level=None)) as db:
        db.execute("insert into spending values ('j 3600.0', '', 5, 9, 9)")
        for run_id in "ab":
            ledger.spend_call(run_id)
            ledger.spend_tokens(run_id, 3)
        rows = db.execute(
            "select run, sum(calls), sum(tokens), min(minute) > 5 from spending "
            "where judge = ? group by run order by run", (f"j {window_s}",),
        ).fetchall()  # fmt: skip
    assert rows == kept


def test_each_step_is_judged_with_the_replies_up_to_it(tmp_path: Path) -> None:
    with model_endpoint(
        lambda body: chat(GOOD if "two" in body["messages"][1]["content"] else '{"score": 1}')
    ) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, answered("one", "two"), per="step")
    assert {step: value for step, (value, _) in said.items()} == {"k~0.0": 0.1, "k~1.0": 0.8}


def conversation(*turns: tuple[str, str]) -> Trajectory:
    """Return a conversation of messages of a user and replies."""
    whole = answered(*(reply for _, reply in turns))
    steps = [
        replace(
            step,
            parent=step.index - 1 if step.index else None,
            new_messages_json=json.dumps([{"role": "user", "content": said}]).encode(),
        )
        for step, (said, _) in zip(whole.steps, turns, strict=True)
    ]
    return replace(whole, steps=tuple(steps), metadata_json=None)


def test_each_step_is_judged_by_the_next_turn(tmp_path: Path) -> None:
    turns = [("Is it open?", "Yes."), ("Thanks! And on Sunday?", "No."), ("Bye", "Bye!")]
    with model_endpoint(
        lambda body: chat(GOOD if "Thanks" in body["messages"][1]["content"] else '{"score": 1}')
    ) as endpoint:
        said, alone = rated(
            tmp_path, endpoint.url, conversation(*turns), conversation(turns[0]), per="next_state"
        )
    assert {step: value for step, (value, _) in said.items()} == {"k~0.0": 0.8, "k~1.0": 0.8}
    assert alone == {}
    first = min((body["messages"][1]["content"] for _, body in endpoint.requests), key=len)
    assert '"Is it open?"' in first and '"Yes."' in first and '"Bye"' not in first
    assert first.index("Yes.") < first.index("Thanks! And on Sunday?")


def test_a_long_conversation_begins_later() -> None:
    whole = conversation(*[(f"{i} " + "x" * 4096, f"{i} yes") for i in range(40)])
    text = filled("{conversation}", whole, whole.steps)
    marker, *messages = json.loads(text)
    assert len(text) < CONVERSATION_BYTES + 1000 and len(messages) > 20
    assert marker["content"] == f"[... {80 - len(messages)} earlier messages ...]"
    assert [m["content"][:3] for m in messages[-2:]] == ["39 ", "39 "]
    short = conversation(("x" * 4096, "yes"))
    assert len(json.loads(filled("{conversation}", short, short.steps))) == 2


def test_a_next_turn_that_is_not_recorded_has_its_reason(tmp_path: Path) -> None:
    one = conversation(("Is it open?", "Yes."), ("Thanks!", "Bye!"))
    bare = replace(one, steps=tuple(replace(s, new_messages_json=None) for s in one.steps))
    with pytest.raises(ValueError, match=r"step k~1\.0: no messages; see jobs\.new_messages_bytes"):
        rated(tmp_path, "http://127.0.0.1:1", bare, per="next_state")


def test_a_step_without_a_verdict_costs_no_other_step_its_reward(tmp_path: Path) -> None:
    def answer(body: Any) -> Reply:
        replies = json.loads(body["messages"][1]["content"].rpartition("\n")[2])
        return {"two": chat("I like it"), "four": (400, "no")}.get(replies[-1], chat(GOOD))

    one = answered("one", "two", "three", "four")
    with model_endpoint(answer) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, one, per="step")
    rewards = list(rewards_of(one, Rule("judged", "1", lambda _: said, "judge"), 0))
    assert [(r.step_id, r.value) for r in rewards] == [
        *(("k~0.0", 0.8), ("k~1.0", None), ("k~2.0", 0.8), ("k~3.0", None))
    ]
    assert rewards[1].reason == "JudgeError: the reply of the judge is no verdict: I like it"
    assert "EndpointError: HTTP 400 of " in str(rewards[3].reason)


def test_steps_that_are_not_recorded_cost_no_other_step_its_reward(tmp_path: Path) -> None:
    one = conversation(("Is it open?", "Yes."), ("Thanks!", "Bye!"), ("Bye", "."))
    bare = replace(one, steps=(*one.steps[:2], replace(one.steps[2], new_messages_json=None)))
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, bare, per="next_state")
    assert said["k~0.0"][0] == 0.8 and "step k~2.0: no messages" in said["k~1.0"]


def test_a_long_trajectory_has_the_time_that_its_requests_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection, and a judge that takes longer for all steps than a verdict may take."""
    monkeypatch.setattr("clawstream.rewards.endpoint.CONNECTIONS", 1)

    def answer(_: Any) -> Reply:
        threading.Event().wait(0.2)
        return chat(GOOD)

    with model_endpoint(answer) as endpoint:
        (said,) = rated(
            tmp_path, endpoint.url, answered(*map(str, range(20))), per="step", timeout_s=2.0
        )
    assert [value for value, _ in said.values()] == [0.8] * 20


def test_a_judge_that_falls_silent_costs_only_the_steps_without_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawstream.rewards.endpoint.CONNECTIONS", 2)
    go_on = threading.Event()

    def answer(body: Any) -> Reply:
        if '"3"' in body["messages"][1]["content"]:
            go_on.wait()
        return chat(GOOD)

    with model_endpoint(answer) as endpoint:
        (said,) = rated(
            tmp_path, endpoint.url, answered(*map(str, range(8))), per="step", timeout_s=1.0
        )
        go_on.set()
    rewarded = [one[0] for one in said.values() if not isinstance(one, str)]
    assert rewarded == [0.8] * 3 and len(said) == 8
    assert all("no " in one and "in 1 s" in one for one in list(said.values())[3:])


def test_what_cannot_work_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="variable NO_SUCH_KEY is not set"):
        rated(tmp_path, "http://127.0.0.1:1", api_key_env="NO_SUCH_KEY")
    with pytest.raises(ValueError, match="all votes would be equal; set temperature"):
        rated(tmp_path, "http://127.0.0.1:1", votes=3)
    for wrong in ({"per": "next_state", "template": "{answer}"}, {"template": "{next}"}):
        with pytest.raises(ValueError, match=r"\{next\} is read with per=next_state"):
            rated(tmp_path, "http://127.0.0.1:1", **wrong)
    with pytest.raises(ValueError, match="no placeholder gold"):
        rated(tmp_path, "http://127.0.0.1:1", template="{gold}")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_the_majority_is_a_most_frequent_score(scores: list[int]) -> None:
    assert scores.count(majority(scores)) == max(map(scores.count, scores))
    assert majority(scores) == majority(scores[::-1])


@given(st.text(), st.integers(0, 10), st.text())
def test_a_verdict_is_found_after_any_words(before: str, score: int, after: str) -> None:
    verdict = json.dumps({"explanation": before, "score": score})
    text = before.replace('"', "") + verdict + after.replace("}", "")
    assert verdict_in(text, 10, 0).score == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('It says {"score": 9} and {x}. {"score": 2.0}', 2),
        ('{"score": 7, "explanation": "ok"} (0 = {bad})', 7),
        ('{"score": 7} {bad}', 7),
        ('{"score": "7"}', 7),
        ('{"score": " 7.0 "}', 7),
        ('```json\n{"explanation": "{}", "score": 7}\n```\nI hope {this} helps.', 7),
        ('<think>{"score": 3}?</think>{"score": 7}', 7),
        ('{"score": 7, "parts": [{"score": 1}]}', 7),
        ('{"score": 7} and {"note": {"x": 1}}', 7),
        ('The set {1, 2}. {"score": 7}', 7),
    ],
)
def test_a_verdict_among_words(text: str, score: int) -> None:
    assert verdict_in(text, 10, 0).score == score


@pytest.mark.parametrize(
    "text",
    [
        '{"explanation": "It says {"score": 9}", "score": 1}',
        '{"score": 1, "explanation": "It says {"score": 9}"}',
        '{"score": 9}, not {"score": 1',
        '{"score": Infinity}',
        '{"note": {"score": 9}}',
        '{"score": 1',
        "[" * 100_000,
    ],
)
def test_a_damaged_verdict_is_none(text: str) -> None:
    with pytest.raises(JudgeError, match="is no verdict"):
        verdict_in(text, 10, 0)


@given(st.lists(st.text(), min_size=1, max_size=3))
def test_replies_in_json_cannot_look_like_others(answers: list[str]) -> None:
    one = answered(*answers)
    text = filled("{replies}\n{answer}", one, own_steps(one), as_json=True)
    replies, answer = map(json.loads, text.split("\n"))
    assert replies == [said_in(step) for step in one.steps] and answer == replies[-1]


@given(st.text())
def test_a_template_is_filled_once(answer: str) -> None:
    one = answered(answer + "{answer}", question="{replies}")
    text = filled("{metadata.question}|{answer}", one, own_steps(one))
    assert text == "{replies}|" + answer + "{answer}"


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l", "j", Budget(None, None, None), replies_max=2)
    for number in range(4):
        ledger.keep(b"%d" % number, b"reply")
    assert [ledger.reply(b"%d" % n) is not None for n in range(4)] == [False, False, True, True]

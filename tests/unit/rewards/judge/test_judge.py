"""The judge on a real HTTP endpoint: a failure has its reason and costs only its own verdict."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_endpoint import Reply, chat, model_endpoint

from rewards.endpoint import EndpointError
from rewards.judge.ledger import Budget, Ledger, OverBudget
from rewards.judge.reward import JudgeError, judge, majority, verdict_in
from rewards.template import filled, own_steps
from schemas.records import Trajectory, TrajectoryStep

GOOD = '{"explanation": "It is right.", "score": 8}'


def trajectory(*answers: str, **metadata: Any) -> Trajectory:
    steps = tuple(
        TrajectoryStep(
            step_id=f"k~{i}.0", index=i, status="ok", drift="root", prompt_tokens=1,
            response_tokens=1, response_json=orjson.dumps({"content": answer}), trainable=True,
            offset=i,
        )
        for i, answer in enumerate(answers)
    )  # fmt: skip
    return Trajectory(
        run_id="r", trajectory_key="k", trajectory_id="k", group_id="g", channel="train",
        outcome="completed", opened_at=0, closed_at=1, metadata_json=orjson.dumps(metadata),
        part=0, parts=1, segments=(), steps=steps,
    )  # fmt: skip


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
    one = trajectory("42", question="6 * 7?")
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        first, second = rated(tmp_path, endpoint.url, one, one)
        (again,) = rated(tmp_path, endpoint.url, one)  # another process
    assert first == (0.8, {"votes": [8], "tokens": 10, "explanation": "It is right."})
    assert second == again == (0.8, {"votes": [8], "tokens": 0, "explanation": "It is right."})
    ((path, body),) = endpoint.requests
    system, user = (message["content"] for message in body["messages"])
    assert path == "/chat/completions" and body["model"] == "m"
    assert "Right is good." in system and "6 * 7?" in user and "[1] 42" in user
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["explanation", "score"]


def test_fields_of_the_request_are_added_and_left_out(tmp_path: Path) -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 9, "seed": 4}
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        rated(tmp_path, endpoint.url, trajectory("a"), extra_body=extra)
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
        ((value, detail),) = rated(tmp_path, endpoint.url, trajectory("a"), votes=3, temperature=1)
    assert (value, sorted(detail["votes"]), detail["explanation"]) == (0.9, [2, 9, 9], "9")


@pytest.mark.parametrize(("failed", "is_decided"), [(1, True), (2, False)])
def test_a_majority_of_the_votes_is_needed(tmp_path: Path, failed: int, is_decided: bool) -> None:
    with model_endpoint(by_seed(*[400] * failed, *[GOOD] * (3 - failed))) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, trajectory("a"), votes=3, temperature=1)
    assert said[0] == 0.8 if is_decided else isinstance(said, EndpointError)


def test_a_failing_endpoint_is_asked_again(tmp_path: Path) -> None:
    replies = iter([(503, "busy"), (429, "slow down"), chat(GOOD)])
    with model_endpoint(lambda _: next(replies)) as endpoint:
        ((value, _),) = rated(tmp_path, endpoint.url, trajectory("a"))
    assert value == 0.8 and len(endpoint.requests) == 3


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        ((503, "busy"), EndpointError, r"HTTP 503 of .*, 2 attempts"),
        ((404, "no such model"), EndpointError, r"HTTP 404 of .*: no such model"),
        ((200, "text"), EndpointError, "is no JSON"),
        ((200, "[]"), EndpointError, "is no JSON object"),
        ((200, {"choices": []}), JudgeError, "has no message"),
        (chat("I like it"), JudgeError, "is no verdict: I like it"),
        (chat('{"score": 11}'), JudgeError, "from 0 to 10: 11"),
        (chat('{"score": NaN}'), JudgeError, "is no verdict"),
        (chat('{"score": true}'), JudgeError, "no whole number"),
    ],
)
def test_each_failure_has_its_reason(
    tmp_path: Path, reply: Reply, error: type[Exception], message: str
) -> None:
    with model_endpoint(lambda _: reply) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, trajectory("a"), attempts=2)
    with pytest.raises(error, match=message):
        raise said


def test_a_judge_that_is_down_has_a_reason(tmp_path: Path) -> None:
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        pass
    (said,) = rated(tmp_path, endpoint.url, trajectory("a"), attempts=1)
    assert isinstance(said, EndpointError) and "Cannot connect to host" in str(said)


def test_a_slow_judge_holds_up_only_its_verdict(tmp_path: Path) -> None:
    go_on = threading.Event()

    def answer(body: Any) -> Reply:
        if "slow" in body["messages"][1]["content"]:
            go_on.wait()
        return chat(GOOD)

    with model_endpoint(answer) as endpoint:
        (slow,) = rated(tmp_path, endpoint.url, trajectory("slow"), timeout_s=0.5)
        (quick,) = rated(tmp_path, endpoint.url, trajectory("a"))
        go_on.set()
    assert isinstance(slow, JudgeError) and str(slow) == "no verdict in 0.5 s"
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
    one, other = trajectory("a"), trajectory("b")
    with model_endpoint(lambda _: chat(GOOD)) as endpoint:
        _, over, kept = rated(tmp_path, endpoint.url, one, other, one, **budget)
        (restarted,) = rated(tmp_path, endpoint.url, other, **budget)
    assert (type(over), str(over), str(restarted)) == (OverBudget, reason, reason)
    assert kept[0] == 0.8 and len(endpoint.requests) == 1


def test_each_step_is_judged_with_the_replies_up_to_it(tmp_path: Path) -> None:
    with model_endpoint(
        lambda body: chat(GOOD if "two" in body["messages"][1]["content"] else '{"score": 1}')
    ) as endpoint:
        (said,) = rated(tmp_path, endpoint.url, trajectory("one", "two"), per="step")
    assert {step: value for step, (value, _) in said.items()} == {"k~0.0": 0.1, "k~1.0": 0.8}


def test_what_cannot_work_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="variable NO_SUCH_KEY is not set"):
        rated(tmp_path, "http://127.0.0.1:1", api_key_env="NO_SUCH_KEY")
    with pytest.raises(ValueError, match="all votes would be equal; set temperature"):
        rated(tmp_path, "http://127.0.0.1:1", votes=3)
    with pytest.raises(ValueError, match="no placeholder gold"):
        rated(tmp_path, "http://127.0.0.1:1", template="{gold}")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_the_majority_is_a_most_frequent_score(scores: list[int]) -> None:
    assert scores.count(majority(scores)) == max(map(scores.count, scores))
    assert majority(scores) == majority(scores[::-1])


@given(st.text(), st.integers(0, 10))
def test_a_verdict_is_found_among_words(words: str, score: int) -> None:
    text = words.replace("{", "").replace("}", "") + json.dumps({"score": score})
    assert verdict_in(text, 10, 0).score == score


@given(st.text())
def test_a_template_is_filled_once(answer: str) -> None:
    one = trajectory(answer + "{answer}", question="{replies}")
    text = filled("{metadata.question}|{answer}", one, own_steps(one))
    assert text == "{replies}|" + answer + "{answer}"


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l", "j", Budget(None, None, None), replies_max=2)
    for number in range(4):
        ledger.keep(b"%d" % number, b"reply")
    assert [ledger.reply(b"%d" % n) is not None for n in range(4)] == [False, False, True, True]

"""Reward rules: a trajectory in, a list of rewards out."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
import pytest
from support.admit import cand

from clawstream.rewards.registry import BUILT_IN, GroupRule, Rule, rule_of
from clawstream.rewards.results import group_rules_of, rewards_of, rewards_of_group, rules_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import Tag, Trajectory, TrajectoryStep
from clawstream.schemas.rule_spec import of_run
from clawstream.schemas.settings import JobsSettings, Settings
from clawstream.schemas.user_function import load_function

FIND = partial(load_function, folders=[])


def trajectory(
    answer: str = "42", metadata: bytes | None = b'{"gold":42}', **more: Any
) -> Trajectory:
    steps = tuple(
        TrajectoryStep(
            step_id=f"k~{i}.0",
            index=i,
            status="ok",
            drift="root",
            prompt_tokens=1,
            response_tokens=1,
            response_json=b'{"content":"%s"}' % text.encode(),
            trainable=True,
            offset=i,
        )
        for i, text in enumerate(["look", answer])
    )
    given: dict[str, Any] = {
        "run_id": "r",
        "trajectory_key": "k",
        "trajectory_id": "k",
        "group_id": "g",
        "channel": "train",
        "outcome": "completed",
        "opened_at": 0,
        "closed_at": 1,
        "metadata_json": metadata,
        "part": 0,
        "parts": 1,
        "segments": (),
        "steps": steps,
    }
    return Trajectory(**(given | more))


@pytest.mark.parametrize(
    ("name", "answer", "gold", "value"),
    [
        ("exact_match", " The  Cat ", '"the cat"', 1.0),
        ("exact_match", "a cat", '"the cat"', 0.0),
        ("last_number", "first 7, then 1,042.", "1042", 1.0),
        ("last_number", "none", "3", 0.0),
        ("last_number", "-3", "3", 0.0),
        ("exact_match", "café", '"cafe\u0301"', 1.0),
        ("exact_match", "STRASSE", '"straße"', 1.0),
        ("exact_match", "3", "3.0", 1.0),
        ("exact_match", "3 ", '"3.0"', 0.0),
        ("exact_match", "true", "true", 1.0),
        ("exact_match", "1", "true", 0.0),
        ("exact_match", "Paris", '["paris", "Paris, France"]', 1.0),
        ("exact_match", "Rome", '{"target": ["Paris"]}', 0.0),
        ("exact_match", "Paris", '{"target": "Paris"}', 1.0),
        ("exact_match", "<think>Rome? No.</think>\n\nParis", '"Paris"', 1.0),
        ("exact_match", "Rome? No.</think>Paris", '"Paris"', 1.0),
        ("exact_match", "Paris<think>and", '"Paris"', 1.0),
        ("last_number", "x = −5", "5", 0.0),
        ("last_number", "x = −5", "-5", 1.0),
        ("last_number", "x = −5", '"−5"', 1.0),
        ("last_number", "= 121932631112635268", "121932631112635269", 0.0),
        ("last_number", "= 121932631112635269123", "121932631112635269123", 1.0),
        ("last_number", "= 121932631112635269123", "121932631112635269124", 0.0),
        ("last_number", "p = .5", "5", 0.0),
        ("last_number", "p = .5", "0.5", 1.0),
        ("last_number", "about 1.5e3", "3", 0.0),
        ("last_number", "about 1.5e3", "1500", 1.0),
        ("last_number", "The roots are (1,2)", "12", 0.0),
        ("last_number", "The roots are (1,2)", "2", 1.0),
        ("last_number", "between 3-5", "5", 1.0),
        ("last_number", "So it is 1080.", '"1,080"', 1.0),
        ("last_number", "0.1", "0.1", 1.0),
        ("last_number", "0.10000000000000001", "0.1", 0.0),
        ("last_number", "3/4", '"0.75"', 1.0),
        ("last_number", "2 or 3", "[2, 3]", 1.0),
        ("last_number", "<think>It may be 42", "42", 0.0),
    ],
)
def test_built_in_rules(name: str, answer: str, gold: str, value: float) -> None:
    said = orjson.dumps(answer)[1:-1].decode()
    assert BUILT_IN[name](trajectory(said, b'{"gold":%s}' % gold.encode())) == value


@pytest.mark.parametrize(
    ("name", "gold", "reason"),
    [
        ("last_number", '"many"', "gold: no single number: many"),
        ("last_number", '"nan"', "gold: no single number: nan"),
        ("last_number", '"3-5"', "gold: no single number: 3-5"),
        ("last_number", '["3", "many"]', "gold: no single number: many"),
        ("last_number", "true", "gold: True is no number"),
        ("exact_match", "[]", "metadata has no gold"),
        ("exact_match", "null", "metadata has no gold"),
        ("exact_match", "[null]", "gold is no text or number: null"),
        ("exact_match", '[["a"]]', 'gold is no text or number: ["a"]'),
        ("exact_match", '{"answer": 1.0}', 'gold is no text or number: {"answer": "1.0"}'),
    ],
)
def test_a_gold_that_cannot_be_read_is_no_reward(name: str, gold: str, reason: str) -> None:
    given = trajectory("3", b'{"gold":%s}' % gold.encode())
    (reward,) = rewards_of(given, Rule(name, "1", BUILT_IN[name]), 0)
    assert (reward.value, reward.reason) == (None, f"ValueError: {reason}")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (0.5, [(None, 0.5, None)]),
        (True, [(None, 1.0, None)]),
        (None, [(None, None, "the function returned None")]),
        (math.nan, [(None, None, "nan is not in [-1e+06, 1e+06]")]),
        (-sys.float_info.max, [(None, None, "-1.79769e+308 is not in [-1e+06, 1e+06]")]),
        (10**400, [(None, None, "the number is not in [-1e+06, 1e+06]")]),
        ((0.5, {"outcome": "passed"}), [(None, 0.5, None)]),
        (
            (0.5, {"long": "x" * 5000}),
            [(None, None, "ValueError: the details have 5011 bytes, above 4096")],
        ),
        ((0.5, 1, 2), [(None, None, "ValueError: too many values to unpack (expected 2)")]),
        ("high", [(None, None, "TypeError: a reward is a number, not str")]),
        (
            {"k~0.0": 1, "k~1.0": None},
            [("k~0.0", 1.0, None), ("k~1.0", None, "the function returned None")],
        ),
        (
            {"k~0.0": 1, "k~1.0": "no verdict"},
            [("k~0.0", 1.0, None), ("k~1.0", None, "no verdict")],
        ),
        (
            {"k~0.0": 1, "k~1.0": [1.0]},
            [
                ("k~0.0", 1.0, None),
                (
                    "k~1.0",
                    None,
                    "ValueError: not enough values to unpack (expected 2, got 1)",
                ),
            ],
        ),
        ({}, [(None, None, "no step was rewarded")]),
        ({"x": 1.0}, [(None, None, "ValueError: no step 'x' in the trajectory")]),
    ],
)
def test_every_answer_is_a_reward_or_says_why_not(said: Any, expected: list[Any]) -> None:
    rewards = list(rewards_of(trajectory(), Rule("f", "2", lambda _: said), 7))
    assert [(r.step_id, r.value, r.reason) for r in rewards] == expected
    assert {
        (r.source, r.name, r.function_version, r.reward_revision, r.created_at) for r in rewards
    } == {("rule", "f", "2", 2, 7)}
    assert len({r.event_id for r in rewards}) == len(rewards)
    assert rewards == list(rewards_of(trajectory(), Rule("f", "2", lambda _: said), 7))


def test_the_answer_of_a_verl_dataset_is_found() -> None:
    said = b'{"data_source":"gsm8k","reward_model":{"style":"rule","ground_truth":"72"}}'
    assert BUILT_IN["last_number"](trajectory("so 72.", said)) == 1.0
    with pytest.raises(ValueError, match="no gold"):
        BUILT_IN["last_number"](trajectory("so 72.", b'{"reward_model":"big"}'))


TEXT = [{"type": "thinking", "thinking": "7?"}, {"type": "text", "text": "42"}]
REPLIES: dict[str, Any] = {
    "chat": {"role": "assistant", "content": "42"},
    "chat, blocks": {"role": "assistant", "content": [{"type": "text", "text": "42"}]},
    "completions": {"text": "42", "finish_reason": "stop"},
    "messages": {"role": "assistant", "content": TEXT},
    "responses": {
        "output": [
            {"type": "reasoning"},
            {"type": "message", "content": [{"type": "output_text", "text": "42"}]},
        ]
    },
}


@pytest.mark.parametrize("protocol", REPLIES)
def test_the_answer_is_read_from_the_replies_of_every_protocol(protocol: str) -> None:
    whole = trajectory()
    last = replace(whole.steps[1], response_json=orjson.dumps(REPLIES[protocol]))
    answered = replace(whole, steps=(whole.steps[0], last))
    assert [BUILT_IN[name](answered) for name in ("exact_match", "last_number")] == [1.0, 1.0]


@pytest.mark.parametrize("tag", ["title", "summary", "compaction", "sub_agent"])
def test_an_auxiliary_call_that_is_logged_last_is_not_the_answer(tag: str) -> None:
    whole = trajectory()
    beside = replace(
        whole.steps[1],
        step_id="k~2.0",
        index=2,
        response_json=b'{"content":"Prices of cats"}',
        tags=(Tag(name=tag, evidence="e"),),
    )
    retried = replace(beside, step_id="k~3.0", index=3, tags=(), marks=("retried",))
    assert BUILT_IN["exact_match"](replace(whole, steps=(*whole.steps, beside, retried))) == 1.0
    with pytest.raises(ValueError, match="no step but auxiliary"):
        BUILT_IN["exact_match"](replace(whole, steps=(beside,)))


def test_lost_or_bare_trajectories_get_an_explicit_none() -> None:
    rule = Rule("exact_match", "x", BUILT_IN["exact_match"])
    (lost,) = rewards_of(
        trajectory(outcome="lost", reason="payload lost to retention", steps=()), rule, 0
    )
    (bare,) = rewards_of(trajectory(metadata=None), rule, 0)
    assert (lost.value, lost.reason) == (None, "trajectory lost: payload lost to retention")
    assert (bare.value, bare.reason, bare.reward_revision) == (None, "ValueError: no metadata", 0)


def test_configured_by_name_or_import_path_and_run() -> None:
    rules = rules_of(
        Settings(
            jobs=JobsSettings(
                reward_functions={
                    "*": ("exact_match@1",),
                    "r1": ("clawstream.rewards.last_number:last_number@v2", "exact_match@3"),
                }
            )
        ),
        FIND,
    )
    assert [(r.name, r.version) for r in of_run(rules, "r1")] == [
        ("last_number", "v2"),
        ("exact_match", "3"),
    ]
    assert [(r.name, r.version) for r in of_run(rules, "other")] == [("exact_match", "1")]
    assert of_run({}, "other") == ()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (ValueError("no number in \ud83d"), "ValueError: no number in \\ud83d"),
        (ValueError("\ud83d" * 300), "ValueError: " + "\\ud83d" * 31 + "\\u"),
        (Unspeakable(), "Unspeakable: its text can't be had, RuntimeError"),
    ],
)
def test_whatever_a_function_raises_is_a_reason_that_a_record_can_hold(
    raised: Exception, reason: str
) -> None:
    def fails(_: Trajectory) -> float:
        raise raised

    (reward,) = rewards_of(trajectory(), Rule("f", "1", fails), 0)
    assert (reward.value, reward.reason) == (None, reason)
    codec = Codec()
    assert codec.decode(codec.encode(reward)) == reward


@pytest.mark.parametrize(
    "spec",
    [
        "exact_match",
        "@1",
        "nope@1",
        "no.module:f@1",
        "math:nope@1",
        "math:pi@1",
        "nowhere.py:f@1",
        ":f@1",
        "exact_match@9223372036854775808",
        "exact_match@" + "1" * 5000,
    ],
)
def test_wrong_names_are_settings_errors(spec: str) -> None:
    with pytest.raises(SettingsError, match=r"jobs\.reward_functions\.r"):
        rules_of(Settings(jobs=JobsSettings(reward_functions={"r": (spec,)})), FIND)


def group(*members: Trajectory | str) -> list[tuple[Any, Trajectory | str]]:
    """Return members with their candidates; a text is a reason why one is not compared."""
    return [
        (cand(f"t{i}"), m if isinstance(m, str) else replace(m, trajectory_id=f"t{i}"))
        for i, m in enumerate(members)
    ]


def test_each_member_of_a_group_gets_its_own_result() -> None:
    seen: list[list[str]] = []

    def compare(members: Sequence[Trajectory]) -> list[Any]:
        seen.append([m.trajectory_id for m in members])
        return [(1.0, {"wins": [1.0]}), 0.5, "EndpointError: down", None]

    rule = GroupRule("best", "3", compare)
    one = trajectory()
    found = rewards_of_group(group(one, "lost", one, one, one), rule, 7)
    assert seen == [["t0", "t2", "t3", "t4"]]
    assert [(r.trajectory_id, r.value, r.reason) for r in found] == [
        ("t0", 1.0, None),
        ("t1", None, "lost"),
        ("t2", 0.5, None),
        ("t3", None, "EndpointError: down"),
        ("t4", None, "the function returned None"),
    ]
    assert found[0].detail_json == b'{"wins":[1.0]}'
    assert {(r.source, r.name, r.reward_revision, r.by, r.created_at) for r in found} == {
        ("judge", "best", 3, "clawstream.compare", 7)
    }
    again = rewards_of_group(group(one, "lost", one, one, one), rule, 9)
    assert [r.event_id for r in again] == [r.event_id for r in found]
    assert len({r.event_id for r in found}) == 5


@pytest.mark.parametrize("wrong", [[1.0], [1.0, "x", 1.0], [1.0, object()], [1.0, (1.0, b"")]])
def test_a_wrong_answer_is_the_reason_of_each_member(wrong: list[Any]) -> None:
    rule = GroupRule("best", "1", lambda _: wrong)
    found = rewards_of_group(group(trajectory(), trajectory()), rule, 0)
    assert [r.value for r in found] == [None, None]
    assert found[0].reason == found[1].reason and "Error" in str(found[0].reason)


def test_nobody_is_compared_with_nobody() -> None:
    rule = GroupRule("best", "1", lambda _: pytest.fail("called"))
    (alone, gone) = rewards_of_group(group(trajectory(), "gone"), rule, 0)
    assert (alone.value, gone.reason) == (None, "gone") and "no other member" in str(alone.reason)


def test_judges_that_compare_are_apart() -> None:
    judge = {"type": "genrm", "url": "http://j", "model": "m", "rubric": "r"}
    settings = Settings.model_validate(
        {
            "jobs": {
                "reward_models": {"one": judge, "best": {**judge, "per": "group"}},
                "reward_functions": {"r": ["one@1", "best@2"], "*": ["exact_match@1"]},
            }
        }
    )

    def find(target: str, configuration: str | None = None) -> Any:
        return (target, configuration)

    names = {run: [str(rule) for rule in rules] for run, rules in rules_of(settings, find).items()}
    assert names == {"r": ["one@1"], "*": ["exact_match@1"]}
    found = group_rules_of(settings, find)
    assert [str(rule) for rule in found["r"]] == ["best@2"] and found["*"] == ()
    with pytest.raises(SettingsError, match=r"gateway\.compute_reward: 'best@2' needs a group"):
        rule_of("best@2", "gateway.compute_reward", find, settings.reward_models)

"""The combination of quality rules into one assessment of a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from clawstream.rewards.quality.registry import Rule, rule_of
from clawstream.rewards.quality.score import Score
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import Finding, Trajectory, TrajectoryStep
from clawstream.schemas.rule_spec import of_run
from clawstream.schemas.user_function import load_function
from clawstream.stream_jobs.reward.assessments import assessment_of, not_assessed, quality_rules_of

FIND = partial(load_function, folders=[])


def trajectory(steps: int = 4, marked: int | None = None, **more: Any) -> Trajectory:
    made = tuple(
        TrajectoryStep(
            step_id=f"k~{i}.0",
            index=i,
            status="ok",
            drift="root",
            prompt_tokens=1,
            response_tokens=1,
            response_json=b"{}",
            trainable=True,
            offset=i,
            marks=("retried",) if i == marked else (),
        )
        for i in range(steps)
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
        "part": 0,
        "parts": 1,
        "segments": (),
        "steps": made,
    }
    return Trajectory(**(given | more))


def says(said: Any, name: str = "f", version: str = "1") -> Rule:
    return Rule(name, version, lambda _: said)


def test_a_step_has_its_lowest_score_and_the_whole_the_lowest_of_the_rules() -> None:
    steps = says([Score(0.5, "meh", "k~1.0"), Score(0.25, "bad", "k~1.0")], "steps")
    whole = says([Score(0.9, "long"), Score(0.5, "odd", "k~3.0")], "whole", "2")
    a = assessment_of(trajectory(), (steps, whole), 7)
    assert a.step_quality == (1.0, 0.25, 1.0, 0.5)
    assert a.quality == 0.8125, (
        "the mean of the first rule's steps, below the 0.9 that the second one says"
    )
    assert (a.rules, a.assessment_revision, a.created_at) == (("steps@1", "whole@2"), 3, 7)
    assert a.findings[0] == Finding(rule="steps@1", step_id="k~1.0", score=0.5, evidence="meh")
    assert [(f.rule, f.score) for f in a.findings] == [
        ("steps@1", 0.5),
        ("steps@1", 0.25),
        ("whole@2", 0.9),
        ("whole@2", 0.5),
    ]


@pytest.mark.parametrize(
    ("said", "quality", "steps"),
    [
        (None, 1.0, (1.0, 1.0)),
        ([], 1.0, (1.0, 1.0)),
        (0.25, 0.25, (1.0, 1.0)),
        (1, 1.0, (1.0, 1.0)),
        (True, 1.0, (1.0, 1.0)),
        ({"k~1.0": 0.5}, 0.75, (1.0, 0.5)),
        ([Score(1.0, "fine")], 1.0, (1.0, 1.0)),
    ],
)
def test_a_rule_may_answer_in_several_ways(
    said: Any, quality: float, steps: tuple[float, ...]
) -> None:
    a = assessment_of(trajectory(2), (says(said),), 0)
    assert (a.quality, a.step_quality) == (quality, steps)
    assert [f.score for f in a.findings] == sorted(
        {
            v
            for v in (0.25, 0.5)
            if v in (said if isinstance(said, dict) else {}).values() or v == said
        }
    )


@pytest.mark.parametrize(
    "said", [1.5, -0.1, float("nan"), "good", {"k~9.0": 0.5}, {"k~0.0": "x"}, [0.5], [Score(2.0)]]
)
def test_a_rule_that_answers_wrongly_counts_for_nothing_and_says_why(said: Any) -> None:
    a = assessment_of(trajectory(2), (says(said, "bad"), says({"k~0.0": 0.5}, "good")), 0)
    assert (a.quality, a.step_quality) == (0.75, (0.5, 1.0))
    failed, _ = a.findings
    assert (failed.rule, failed.score) == ("bad@1", None) and failed.evidence
    alone = assessment_of(trajectory(2), (says(said, "bad"),), 0)
    assert (alone.quality, alone.step_quality) == (None, ()), (
        "nothing is known, which is neither 0.0 nor 1.0"
    )


def test_a_rule_that_raises_in_the_middle_counts_for_nothing() -> None:
    def half(_: Trajectory) -> Iterable[Score]:
        yield Score(0.0, "seen", "k~0.0")
        raise RuntimeError("oh")

    a = assessment_of(trajectory(2), (Rule("half", "1", half), says(None)), 0)
    assert (a.quality, a.step_quality) == (1.0, (1.0, 1.0))
    assert a.findings == (Finding(rule="half@1", evidence="RuntimeError: oh"),)


def test_marked_steps_do_not_count_for_the_whole() -> None:
    bad = says({"k~0.0": 0.0})
    assert assessment_of(trajectory(2, marked=0), (bad,), 0).quality == 1.0
    assert assessment_of(trajectory(2), (bad,), 0).quality == 0.5
    assert assessment_of(trajectory(1, marked=0), (bad,), 0).quality == 0.0, (
        "unless there are no others"
    )


def test_what_is_lost_or_empty_is_not_assessed() -> None:
    lost = assessment_of(trajectory(outcome="lost", reason="gone"), (says(1.0),), 0)
    assert (lost.quality, lost.step_quality) == (None, ()) and "gone" in (
        lost.findings[0].evidence or ""
    )
    empty = assessment_of(trajectory(0), (says(None),), 0)
    assert (empty.quality, empty.step_quality) == (None, ())
    assert (
        not_assessed(trajectory(), (says(1.0),), 0, "blob away").findings[0].evidence == "blob away"
    )


def test_findings_are_bounded_scores_are_not() -> None:
    many = assessment_of(
        trajectory(500), (says([Score(0.5, "x" * 999, f"k~{i}.0") for i in range(500)]),), 0
    )
    assert len(many.findings) == 200 and len(many.findings[0].evidence or "") == 200
    assert many.step_quality == (0.5,) * 500


def test_the_id_is_of_trajectory_and_rules_alone() -> None:
    def id_of(rules: tuple[Rule, ...], when: int = 0, **more: Any) -> str:
        return assessment_of(trajectory(**more), rules, when).event_id

    one = id_of((says(0.5),))
    assert one == id_of((says(0.5),), when=9)
    assert (
        len(
            {
                one,
                id_of((says(0.5, version="2"),)),
                id_of((says(0.5), says(0.5, "g"))),
                id_of((says(0.5),), trajectory_id="k~2"),
            }
        )
        == 4
    )


def unspeakable(_: Trajectory) -> float:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    raise Unspeakable


def test_whatever_a_rule_says_becomes_a_record() -> None:
    """A rule's exceptions and evidence may contain model text that is not valid UTF-8.

    Evidence may have any type.
    """

    def quotes(_: Trajectory) -> float:
        raise ValueError("no number in \ud83d")

    rules = (
        says([Score(0.5, "says \ud83d")], "lone"),
        says([Score(0.5, 123)], "number"),
        says([Score(0.5, {"a": 1})], "mapping"),  # type: ignore[arg-type]
        Rule("quotes", "1", quotes),
        Rule("unspeakable", "1", unspeakable),
    )
    a = assessment_of(trajectory(), rules, 0)
    assert [(f.rule, f.score, f.evidence) for f in a.findings] == [
        ("lone@1", 0.5, "says \\ud83d"),
        ("number@1", None, "TypeError: evidence is text, not int"),
        ("mapping@1", None, "TypeError: evidence is text, not dict"),
        ("quotes@1", None, "ValueError: no number in \\ud83d"),
        ("unspeakable@1", None, "Unspeakable: its text can't be had, RuntimeError"),
    ]
    codec = Codec()
    assert codec.decode(codec.encode(a)) == a


def only_short(t: Trajectory) -> float:
    return 1.0 if len(t.steps) < 3 else 0.5


def test_rules_of_the_settings() -> None:
    rules = quality_rules_of(
        {
            "a": (f"{__name__}:only_short@3",),
            "*": ("built_in", "clawstream.schemas.tokens:count@x"),
        },
        FIND,
    )
    (own,) = of_run(rules, "a")
    assert (str(own), own.revision) == ("only_short@3", 3) and callable(own.function)
    assert [str(r) for r in of_run(rules, "b")][-2:] == ["retried@1", "count@x"]
    assert of_run(quality_rules_of({"a": ("length@1",)}, FIND), "b") == ()


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        (("nothing@1",), ("no built-in quality rule 'nothing'; there are drift, format,")),
        (("length",), "write name@version"),
        (("no.such:f@1",), "ModuleNotFoundError"),
        (("length@1", "length@2"), "length is named twice"),
        (("built_in", "drift@2"), "drift is named twice"),
        (("length@9223372036854775808",), ("is at most 9223372036854775807")),
        (("length@9223372036854775807", "format@1"), "the sum of the versions is above"),
    ],
)
def test_wrong_rules_are_settings_errors(specs: tuple[str, ...], why: str) -> None:
    with pytest.raises(SettingsError, match=why) as e:
        quality_rules_of({"r": specs}, FIND)
    assert str(e.value).startswith("setting jobs.quality_functions.r: ")


def test_user_rule_by_name() -> None:
    function: Callable[[Trajectory], Any] = rule_of(f"{__name__}:only_short@3", "s", FIND).function
    assert function(trajectory(5)) == 0.5
    assert replace(trajectory(), run_id="x").run_id == "x"

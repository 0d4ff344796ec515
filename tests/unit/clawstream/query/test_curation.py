"""Curation by query: the targets of a condition over the lake, and the mark on each target."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.admit import cand
from support.small_lake import SmallLake

from clawstream.inspector.errors import InvalidMark
from clawstream.inspector.marks.mark import Mark, Target
from clawstream.query.connection import SqlError, connect
from clawstream.query.curation import targets
from clawstream.runtime.user import current_user
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    CandidateStep,
    Curation,
    Place,
    ReadyBatch,
    Reward,
    Step,
    Trajectory,
    TrajectoryStep,
)
from clawstream.schemas.settings import Settings

ANONYMOUS = "anonymous-" + "0" * 32
INSIDE = f"{ANONYMOUS}~01J00000000000000000000000"
AT = Place(topic_id="T", partition=0, first_offset=0, last_offset=0)


@pytest.fixture
def sql(tmp_path: Path) -> Any:
    """Trajectories a (good), b (bad, admitted) and one of an anonymous session; two steps each."""
    settings = Settings(data_dir=tmp_path)
    lake = SmallLake(settings)
    ids = {"a": "a", "b": "b", INSIDE: ANONYMOUS}
    candidates, steps, trajectories = [], [], []
    for tid, key in ids.items():
        two = [f"{key}~{tid[-1]}{i}.0" for i in (0, 1)]
        low = 0.1 if tid == "b" else 0.9
        scored = tuple(
            CandidateStep(
                step_id=s, index=i, response_tokens=5, trainable=True, quality=q, assessed_quality=q
            )
            for i, (s, q) in enumerate(zip(two, (low, 0.5), strict=True))
        )
        candidates.append(cand(tid, trajectory_key=key, quality=low, steps=scored))
        for s in two:
            steps.append(Step(
                step_id=s, run_id="r", trajectory_key=key, call_id=s[:-2], choice_index=0,
                protocol="p", model="m", status="ok", streamed=False, request_json=b"{}",
                response_json=b"{}", gateway_id="g", received_at=0, finished_at=0,
            ))  # fmt: skip
        trajectories.append(Trajectory(
            run_id="r", trajectory_key=key, trajectory_id=tid, group_id="g", channel="train",
            outcome="completed", opened_at=0, closed_at=1, part=0, parts=1, segments=(),
            steps=tuple(TrajectoryStep(
                step_id=s, index=i, status="ok", drift="root", prompt_tokens=1, response_tokens=5,
                response_json=b"{}", trainable=True, offset=i,
            ) for i, s in enumerate(two)),
        ))  # fmt: skip
    lake.put("candidates", "CC", *candidates)
    lake.put("steps", "SS", *steps)
    lake.put("trajectories", "TT", *trajectories)
    member = BatchMember(
        trajectory_id="b",
        trajectory_key="b",
        revision=0,
        place=AT,
        rewards=(),
        untrainable_steps=(),
        trainable_tokens=5,
    )
    lake.put("groups", "BB", ReadyBatch(
        run_id="r", channel="train", batch_seq=0,
        groups=(BatchGroup(group_id="g", round=0, n=1, members=(member,)),), policy_version=1,
        sync_every=1, algorithm="grpo", reward_weights={}, input_topic_id="C", input_partition=0,
        input_from=0, input_to=1, content_hash="", trainable_tokens=5, created_at_event_time=0,
    ))  # fmt: skip
    connection = connect(settings)
    yield connection
    connection.close()


@pytest.mark.slow
def test_trajectories_and_steps_that_a_condition_finds(sql: Any) -> None:
    assert targets(sql, "trajectories", "quality < 0.3") == [Target("r", "b", None, True)]
    assert targets(sql, "trajectories", "quality > 0.3 -- the rest") == [
        Target("r", "a", None, False),
        Target("r", INSIDE, None, False),
    ]
    assert targets(sql, "steps", "quality < 0.3") == [Target("r", "b", "b~b0.0", True)]
    assert targets(sql, "steps", f"trajectory_id = '{INSIDE}' and step_index = 1") == [
        Target("r", INSIDE, f"{ANONYMOUS}~01.0", False)
    ]
    assert (
        targets(sql, "steps", "true", "other") == []
        and len(targets(sql, "steps", "true", "r")) == 6
    )
    for wrong in ("colour = 'red'", "quality <", "quality < (SELECT"):
        with pytest.raises(SqlError):
            targets(sql, "trajectories", wrong)


@pytest.mark.slow
def test_a_mark_that_was_taken_back_does_not_hold(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    lake = SmallLake(settings)
    said: dict[str, dict[str, Any]] = {
        "a": {"quality": 0.5, "tags": ("x",)},
        "b": {"quality": 0.1, "trainable": False},
        "c": {"takes_back": "b"},
    }
    marks = [
        Curation(event_id=n, run_id="r", trajectory_key="k", by=n, created_at=1, **values)
        for n, values in said.items()
    ]
    query = "select quality, trainable, tags, last_by, marks from curated"
    lake.put("curation", "RR", *marks[:2])
    assert connect(settings).execute(query).fetchall() == [(0.1, False, ["x"], "b", 2)]
    lake.put("curation", "RR", *marks[2:])
    assert connect(settings).execute(query).fetchall() == [(0.5, None, ["x"], "a", 1)]


def test_the_mark_names_what_it_is_of() -> None:
    mark = Mark("ann", quality=0.0, trainable=False, tags=("bad",), note="why")
    (plain,) = mark.events(Target("r", "a"), 5)
    assert (plain.run_id, plain.trajectory_key, plain.trajectory_id, plain.step_id) == (
        "r",
        "a",
        None,
        None,
    )
    assert isinstance(plain, Curation) and plain.created_at == 5
    assert (plain.by, plain.quality, plain.trainable, plain.tags, plain.note) == (
        "ann",
        0.0,
        False,
        ("bad",),
        "why",
    )
    (inside,) = mark.events(Target("r", INSIDE, f"{ANONYMOUS}~01.0"), 5)
    assert (inside.trajectory_key, inside.trajectory_id, inside.step_id) == (
        ANONYMOUS,
        INSIDE,
        f"{ANONYMOUS}~01.0",
    )
    (again,) = mark.events(Target("r", "a"), 5)
    assert plain.event_id != again.event_id, "said again it counts again"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "the mark is empty"), ({"quality": 2.0}, "quality: 2"),
        ({"quality": float("nan")}, "quality"), ({"tags": ("",)}, "tags"),
        ({"tags": ("x",) * 51}, "tags"), ({"reward": float("inf")}, "reward"),
        ({"note": "x" * 2001}, "note"), ({"reward": 1.0, "reward_name": ""}, "reward_name"),
    ],
)  # fmt: skip
def test_a_mark_that_says_nothing_or_too_much(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidMark, match=why):
        Mark("ann", **wrong)


def test_a_reward_of_a_person_is_an_event_of_its_own() -> None:
    mark = Mark("ann", note="why", reward=0.5, reward_name="taste")
    curation, reward = mark.events(Target("r", "a", "a~1.0"), 7)
    assert isinstance(curation, Curation) and curation.note == "why"
    assert isinstance(reward, Reward) and (reward.source, reward.name) == ("human", "taste")
    assert (reward.value, reward.reward_revision, reward.step_id) == (0.5, 7, "a~1.0")


def test_an_open_session_of_the_gateway_is_not_marked_as_a_whole() -> None:
    mark = Mark("ann", quality=0.0)
    with pytest.raises(InvalidMark, match="mark a step"):
        list(mark.events(Target("r", ANONYMOUS), 5))
    (of_step,) = mark.events(Target("r", ANONYMOUS, f"{ANONYMOUS}~1.0"), 5)
    assert of_step.trajectory_id is None and of_step.step_id == f"{ANONYMOUS}~1.0"


def test_who_did_it_has_a_name_also_where_accounts_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    assert current_user().startswith("ann@")
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert current_user().startswith(f"{os.getuid()}@")

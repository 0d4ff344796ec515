"""Readiness: the reasons against training are equal in Python, SQL and admission."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.admit import cand, fold, policy, refusals, reward
from support.readiness import CONDITIONS, Readiness, compute_readiness

from clawstream.query.connection import connect
from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    CandidateStep,
    PolicyApplied,
    RewardValue,
    WeightVersion,
)
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.main import Lake
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord

PLACE = {"topic_id": b"T", "partition": b"0", "first_offset": b"0", "last_offset": b"0"}


def reasons(r: Readiness) -> list[str]:
    return [lack.reason for lack in r.unmet_conditions]


def test_a_trajectory_that_lacks_nothing_is_ready() -> None:
    r = compute_readiness(cand("a"), policy(), 0)
    assert (r.ready, r.awaiting_input, r.score, r.unmet_conditions, r.staleness) == (
        True,
        False,
        1.0,
        (),
        0,
    )
    assert [(s.step_id, s.ready, s.score, s.unmet_conditions) for s in r.steps] == [
        ("a~1.0", True, 1.0, ())
    ]


def test_everything_that_is_lacking_is_named() -> None:
    strict = policy(
        min_trainable_tokens=6,
        max_trajectory_tokens=8,
        min_quality=0.5,
        max_staleness=1,
        require_assessment=True,
        min_step_quality=0.5,
        untrained_tags=("title",),
        group_size=1,
    )
    poor = CandidateStep(
        step_id="a~1.0",
        index=0,
        response_tokens=5,
        trainable=True,
        quality=0.4,
        tags=("title",),
        oldest_sync_index=0,
    )
    r = compute_readiness(
        cand("a", value=None, outcome="timed_out", quality=0.4, steps=(poor,)),
        strict,
        3,
        has_payload=False,
    )
    assert reasons(r) == list(CONDITIONS)
    assert (r.ready, r.awaiting_input, r.score, r.staleness) == (False, False, 0.0, 3)
    details = {lack.reason: lack.detail for lack in r.unmet_conditions}
    assert (
        details["quality"] == "quality 0.4 below 0.5" and details["stale"] == "3 versions, limit 1"
    )
    assert details["reward_missing"] == "no value of rule"
    (step,) = r.steps
    assert [lack.reason for lack in step.unmet_conditions] == [
        "tagged",
        "quality",
        "stale",
    ] and step.score == 0.25


def test_what_may_still_come_is_awaited() -> None:
    waits = compute_readiness(cand("a", rewards=()), policy(), None)
    assert (waits.ready, waits.awaiting_input, reasons(waits)) == (False, True, ["reward_missing"])
    assessed = compute_readiness(cand("a"), policy(require_assessment=True), None)
    assert (assessed.awaiting_input, reasons(assessed)) == (True, ["assessment_missing"])
    hopeless = compute_readiness(cand("a", rewards=(), outcome="lost"), policy(), None)
    assert (hopeless.awaiting_input, reasons(hopeless)) == (False, ["outcome", "reward_missing"])


def test_validation_asks_for_no_version_and_no_freshness() -> None:
    old = cand("a", channel="val", oldest_sync_index=None)
    assert compute_readiness(old, policy(max_staleness=0), 9).ready
    assert reasons(compute_readiness(cand("a", oldest_sync_index=None), policy(), 9)) == [
        "untrainable"
    ]


def drawn(rng: random.Random, number: int) -> tuple[Candidate, AdmissionPolicy]:
    """Draw a random candidate and policy whose values are close to each other's limits."""

    def maybe(*values: Any) -> Any:
        return rng.choice([None, *values])

    def a_reward() -> RewardValue:
        value = rng.choice([None, 0.0, 1.0, 0.5, float("nan"), 1e6])
        step = rng.choice([None, None, "x~1.0"])
        return RewardValue(
            source=rng.choice(["rule", "human", "env"]),
            name=rng.choice(["a", "b/c"]),
            function_version="1",
            step_id=step,
            value=value,
            reward_revision=0,
        )

    steps = tuple(
        CandidateStep(
            step_id=f"t{number}~{i}.0",
            index=i,
            response_tokens=rng.randint(0, 4),
            trainable=rng.random() < 0.8,
            quality=maybe(0.2, 0.5, 0.9),
            tags=tuple(rng.sample(["title", "x"], rng.choice([0, 0, 1]))),
            oldest_sync_index=rng.choice([None, 1, 2, 3, 4]),
        )
        for i in range(rng.randint(0, 3))
    )
    made = Candidate(
        run_id=f"r{number}",
        channel=rng.choice(["train", "val"]),
        trajectory_key=f"t{number}",
        trajectory_id=f"t{number}",
        group_id="g",
        revision=rng.randint(0, 3),
        outcome=rng.choice(["completed", "completed", "failed", "timed_out"]),
        opened_at=0,
        closed_at=1,
        rewards=tuple(a_reward() for _ in range(rng.randint(0, 3))),
        steps=steps,
        prompt_tokens=3,
        trainable_tokens=sum(s.response_tokens for s in steps if s.trainable),
        oldest_sync_index=maybe(1, 2, 3),
        trainable=rng.random() < 0.8,
        quality=maybe(0.2, 0.5, 0.9),
        tags=rng.choice([(), (), ("title",)]),
        assessment_revision=maybe(1),
    )
    asked = policy(
        run_id=made.run_id,
        required_rewards=rng.choice([(), ("rule",), ("rule/b/c", "human")]),
        reward_weights=rng.choice([{}, {"rule/a": 0.5}, {"rule/b/c": 2.0, "env/a": 0.0}]),
        max_staleness=maybe(0, 2),
        min_trainable_tokens=rng.choice([0, 3]),
        max_trajectory_tokens=maybe(6, 9),
        train_outcomes=rng.choice([("completed",), ("completed", "failed")]),
        min_quality=maybe(0.5),
        min_step_quality=maybe(0.5),
        untrained_tags=rng.choice([(), ("title",), ("title", "y")]),
        require_assessment=rng.random() < 0.3,
    )
    return made, asked


@pytest.fixture
def lake(tmp_path: Path) -> tuple[Settings, Any]:
    settings = Settings(data_dir=tmp_path)
    made = Lake(settings.lake_uri, {}, 1000)
    made.acquire()

    def put(name: str, *records: tuple[Any, dict[str, bytes]]) -> None:
        placed = [
            ConsumedRecord("T", 0, i, 1000 + i, headers, r)
            for i, (r, headers) in enumerate(records)
        ]
        rows = [row for p in placed for row in catalog()[name].rows_of(p)]
        made.append(name, rows, {("T", 0): len(records)}, reject=lambda *_: None)

    return settings, put


@pytest.mark.slow
def test_sql_says_the_same(lake: tuple[Settings, Any]) -> None:
    settings, put = lake
    rng = random.Random(5)
    candidates, policies, versions, expected = [], [], [], {}
    for number in range(400):
        c, p = drawn(rng, number)
        has_payload, newest = rng.random() < 0.8, rng.choice([None, 2, 4])
        candidates.append((c, PLACE if has_payload else {}))
        policies.append(
            (
                PolicyApplied(
                    run_id=c.run_id, channel=c.channel, policy=p, input_topic_id="C", from_offset=0
                ),
                {},
            )
        )
        if newest is not None:
            versions.append(
                (
                    WeightVersion(
                        version_id=f"{c.run_id}/{newest}.0",
                        run_id=c.run_id,
                        sync_index=newest,
                        attempt=0,
                        format="full",
                        files=(),
                        channel="train",
                        metrics={},
                        created_at=0,
                    ),
                    {},
                )
            )
        expected[c.trajectory_id] = compute_readiness(c, p, newest, has_payload)
    put("candidates", *candidates)
    put("run_events", *policies)
    put("weights", *versions)
    sql = connect(settings)
    rows = sql.execute(
        "select trajectory_id, ready, awaiting_input, score, unmet_conditions, staleness "
        "from readiness"
    ).fetchall()
    assert len(rows) == len(expected)
    for tid, *said in rows:
        r = expected[tid]
        unmet_conditions = list(dict.fromkeys(reasons(r)))
        assert said == [
            r.ready,
            r.awaiting_input,
            pytest.approx(r.score),
            unmet_conditions,
            r.staleness,
        ], (
            tid,
            said,
            r,
        )
    assert (
        sum(r.ready for r in expected.values()) >= 10
        and sum(r.awaiting_input for r in expected.values()) > 5
    )
    seen = sql.execute(
        "select step_id, ready, score, unmet_conditions from step_readiness"
    ).fetchall()
    steps = {s.step_id: s for r in expected.values() for s in r.steps}
    assert len(seen) == len(steps)
    for sid, *said in seen:
        s = steps[sid]
        assert said == [
            s.ready,
            pytest.approx(s.score),
            [lack.reason for lack in s.unmet_conditions],
        ], sid
    sql.close()


def test_admission_refuses_for_the_first_thing_that_is_lacking() -> None:
    """Groups of one: no other member can affect the decision."""
    rng = random.Random(7)
    seen = set()
    for number in range(600):
        c, p = drawn(rng, number)
        c, p = (
            Candidate(
                **{f: getattr(c, f) for f in Candidate.__dataclass_fields__}
                | {"run_id": "r", "channel": "train", "group_size": 1}
            ),
            AdmissionPolicy(
                **{f: getattr(p, f) for f in AdmissionPolicy.__dataclass_fields__}
                | {"run_id": "r", "algorithm": "sft", "min_members": 1, "drop_zero_variance": False}
            ),
        )
        r, out = compute_readiness(c, p, 0), fold(p, c)
        if r.ready:
            assert refusals(out) == [] and len(out) == 1
        elif r.awaiting_input:
            assert out == []
        else:
            assert refusals(out) == [(reasons(r)[0], (c.trajectory_id,), True)]
            seen.add(reasons(r)[0])
    assert seen >= {"outcome", "untrainable", "too_short", "too_long", "quality", "reward_missing"}
    assert reward(0.5).value == 0.5

"""The views of readiness: SQL hands candidates and policies to the rules of admission."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from support.admit import cand, policy, reward
from support.small_lake import SmallLake

from clawstream.query.connection import connect, rows_of
from clawstream.query.views.verdicts import readiness_json
from clawstream.schemas.records import CandidateStep, PolicyApplied, WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import SqlError


def test_a_candidate_of_an_older_file_has_the_defaults_of_its_fields() -> None:
    candidate = dataclasses.asdict(cand("a")) | {"tags": None, "quality": math.nan}
    member = json.dumps({"candidate": candidate, "place": None})
    answer = readiness_json(member, json.dumps(dataclasses.asdict(policy())), None)
    assert json.loads(answer)["unmet_conditions"] == ["untrainable"]


@pytest.mark.slow
def test_readiness_is_that_of_admission(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    lake = SmallLake(settings)
    in_force = policy(policy_version=2, max_staleness=1, untrained_tags=("title",))
    applied = PolicyApplied(
        run_id="r", channel="train", policy=in_force, input_topic_id="C", from_offset=0
    )
    version = WeightVersion(
        version_id="r/3.0", run_id="r", sync_index=3, attempt=0, format="full", files=(),
        channel="train", metrics={}, created_at=0,
    )  # fmt: skip
    step = CandidateStep(
        step_id="d~1.0", index=0, response_tokens=5, trainable=True, tags=("title",),
        oldest_sync_index=3,
    )  # fmt: skip
    fresh = {"oldest_sync_index": 2}
    lake.put("run_events", "B", applied)
    lake.put("weights", "W", version)
    lake.put(
        "candidates", "C",
        cand("a", **fresh), cand("b", **fresh, rewards=(reward(math.nan),)),
        cand("c", **fresh, rewards=()), cand("d", **fresh, steps=(step,)), cand("e"),
        cand("other", run_id="without-a-policy"),
    )  # fmt: skip
    lake.put("candidates", "C", cand("f", **fresh), headers={})
    sql = connect(settings)
    rows = sql.execute(
        """SELECT trajectory_id, ready, awaiting_input, score, unmet_conditions, staleness,
            trainable_tokens, training_reward, admission_policy_version
        FROM readiness ORDER BY 1"""
    ).fetchall()
    assert rows == [
        ("a", True, False, 1.0, [], 1, 5, 1.0, 2),
        ("b", False, False, 0.875, ["reward_missing"], 1, 5, None, 2),
        ("c", False, True, 0.875, ["reward_missing"], 1, 5, None, 2),
        ("d", False, False, 0.75, ["untrainable", "too_short"], 1, 0, 1.0, 2),
        ("e", False, False, 0.875, ["stale"], 3, 5, 1.0, 2),
        ("f", False, False, 0.875, ["untrainable"], 1, 5, 1.0, 2),
    ]
    steps = sql.execute(
        """SELECT step_index, admission_policy_version, ready, score, unmet_conditions, staleness
        FROM step_readiness WHERE trajectory_id = 'd'"""
    ).fetchall()
    assert steps == [(0, 2, False, 0.75, ["tagged"], 0)]
    other = json.dumps(dataclasses.asdict(policy(policy_version=7, required_rewards=())))
    (row,) = sql.execute(
        """SELECT count(*) FILTER (ready), any_value(admission_policy_version)
        FROM readiness_under($policy)""",
        {"policy": other},
    ).fetchall()
    assert row == (4, 7)
    with pytest.raises(SqlError, match="missing required field"):
        rows_of(sql, "FROM readiness_under('{}')", {})
    sql.close()

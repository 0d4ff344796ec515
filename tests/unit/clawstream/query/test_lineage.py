"""Lineage over a small lake.

The lake has resumed attempts, several batches per version, late revisions, channels and recreated
topics.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.small_lake import SmallLake
from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.query.connection import connect
from clawstream.query.lineage import Lineage, NotInLake
from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs

RUN = "r"


def version(
    name: str,
    parent: str | None,
    first: int | None = None,
    last: int | None = None,
    topic: str = "BB",
) -> records.WeightVersion:
    sync, attempt = map(int, name.split("."))
    return records.WeightVersion(
        version_id=f"{RUN}/{name}", run_id=RUN, sync_index=sync, attempt=attempt, format="full",
        files=(), channel="train", parent_version=f"{RUN}/{parent}" if parent else None,
        batches_topic_id=topic, first_batch_seq=first, last_batch_seq=last,
        metrics={}, created_at=1,
    )  # fmt: skip


def step(
    key: str, n: int, versions: dict[str, tuple[int, int]] | str = f"{RUN}/0.0"
) -> records.Step:
    """Return a step.

    Args:
        versions: spans by version, or one label for the whole response.
    """
    label = versions if isinstance(versions, str) else None
    spans = versions.items() if isinstance(versions, dict) else ()
    return records.Step(
        step_id=f"{key}~{n}.0", run_id=RUN, trajectory_key=key, call_id=f"{key}~{n}",
        choice_index=0, protocol="p", model="m", status="ok", streamed=False, request_json=b"{}",
        response_json=b"{}", prompt_token_ids=pack_ids([1, 2]),
        response_token_ids=pack_ids([3, 4, 5]), response_logprobs=pack_logprobs([-1.0] * 3),
        version_first=label, version_last=label,
        versions=tuple(records.VersionSpan(version=v, start=a, end=b) for v, (a, b) in spans),
        gateway_id="g", received_at=1, finished_at=1,
    )  # fmt: skip


class Story(SmallLake):
    """Writes the records of a run."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.places: dict[str, int] = {}

    def closed(
        self,
        key: str,
        *steps: records.Step,
        group: str | None = None,
        parts: int = 1,
        **changes: Any,
    ) -> None:
        """Write a closed trajectory and its steps.

        Args:
            parts: the number of records that the trajectory is split into.
            changes: values of `TrajectoryStep` fields, by `step<index>`.
        """
        said = [
            records.TrajectoryStep(
                **{"step_id": s.step_id, "index": i, "parent": i - 1 if i else None, "segment": i,
                   "status": "ok", "drift": "clean" if i else "root", "prompt_tokens": 2,
                   "response_tokens": 3, "response_json": b"{}", "oldest_version": f"{RUN}/0.0",
                   "newest_version": f"{RUN}/0.0", "trainable": True, "offset": i}
                | changes.get(f"step{i}", {})
            )
            for i, s in enumerate(steps)
        ]  # fmt: skip
        cut = len(said) // parts
        pieces = [
            said[i * cut : (i + 1) * cut if i < parts - 1 else len(said)] for i in range(parts)
        ]
        self.put("steps", "SS", *steps)
        self.put("trajectories", "TT", *(
            records.Trajectory(
                run_id=RUN, trajectory_key=key.partition("~")[0], trajectory_id=key,
                group_id=group or key.partition("-")[0], channel="train", outcome="completed",
                opened_at=1000, closed_at=2000, part=i, parts=parts, segments=(),
                steps=tuple(piece),
            )
            for i, piece in enumerate(pieces)
        ))  # fmt: skip
        self.places[key] = self.next["TT"] - 1

    def member(
        self,
        key: str,
        reward: float | None = 1.0,
        revision: int = 0,
        untrainable: tuple[str, ...] = (),
    ) -> records.BatchMember:
        value = records.RewardValue(
            source="env", name="score", function_version="1", value=reward, reward_revision=0
        )
        last = self.places.get(key, 0)
        return records.BatchMember(
            trajectory_id=key, trajectory_key=key.partition("~")[0], revision=revision,
            place=records.Place(
                topic_id="TT", partition=0, first_offset=max(0, last - 1), last_offset=last
            ),
            rewards=(value,),
            untrainable_steps=untrainable, trainable_tokens=3, oldest_sync_index=0,
        )  # fmt: skip

    def batch(
        self,
        seq: int,
        *groups: list[records.BatchMember],
        channel: Any = "train",
        topic: str = "BB",
        n: int = 2,
    ) -> None:
        made = [
            records.BatchGroup(
                group_id=g[0].trajectory_id.partition("-")[0], round=0, n=n, members=tuple(g)
            )
            for g in groups
        ]
        record = records.ReadyBatch(
            run_id=RUN, channel=channel, batch_seq=seq, groups=tuple(made), policy_version=7,
            sync_every=2, algorithm="grpo", reward_weights={}, input_topic_id="CC",
            input_partition=0, input_from=0, input_to=1, content_hash="h",
            trainable_tokens=3, created_at_event_time=1,
        )  # fmt: skip
        self.put("batches", f"{topic}", record)
        self.next[topic] -= 1
        self.put("groups", f"{topic}", record)

    def trained(self, name: str, seq: int, reasons: dict[str, dict[str, str | None]]) -> None:
        """Write what the trainer of a version did with the steps of trajectories of a batch."""
        made = [
            records.TrainedTrajectory(
                run_id=RUN, trajectory_key=key.partition("~")[0], trajectory_id=key,
                version_id=f"{RUN}/{name}", batch_seq=seq,
                steps=tuple(
                    records.StepTraining(step_id=s, untrained_reason=why)
                    for s, why in steps.items()
                ),
            )
            for key, steps in reasons.items()
        ]  # fmt: skip
        self.put("trained_trajectories", "NT", *made)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run of two batches per version whose trainer died after 2.0 and resumed as 2.1."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("lineage"))
    lake = Story(settings)
    for seq in range(6):
        pair = [f"g{seq}-{n}" for n in range(2)]
        for key in pair:
            lake.closed(key, step(key, 1), step(key, 2))
        lake.batch(seq, [lake.member(pair[0]), lake.member(pair[1], 0.0)])
    # Batch 6: an untrained step for each reason, two parts, spans of two versions, a trajectory of
    # an anonymous session, late revisions.
    lake.closed(
        "g6-0", *(step("g6-0", i, {f"{RUN}/1.0": (0, 1), f"{RUN}/2.1": (1, 3)}) for i in range(4)),
        parts=2, step0={"trainable": False, "untrainable_reason": "retried"},
        step1={"tags": (records.Tag(name="title", evidence="e"),)},
        step2={"oldest_version": f"{RUN}/1.0", "newest_version": f"{RUN}/2.1"},
        step3={"segment": None},
    )  # fmt: skip
    session = "anonymous-" + "0" * 32
    lake.closed(f"{session}~9", step(session, 9), step(session, 10), group="g6")
    lake.closed("g6-1", step("g6-1", 1))
    g6 = [
        lake.member("g6-0", untrainable=("g6-0~1.0",), revision=2),
        lake.member("g6-1", 0.0),
        lake.member(f"{session}~9", None),
    ]
    lake.batch(6, g6)
    late = records.Late(
        run_id=RUN,
        channel="train",
        trajectory_id="g6-0",
        revision=3,
        missed_batch_seq=6,
        input_to=9,
    )
    lake.put("late_revisions", "BB", late)
    # The group g7 has one reward, so there is no comparison. The lake lacks the payload of g9.
    for key in ("g7-0", "g7-1"):
        lake.closed(key, step(key, 1))
    lake.batch(7, [lake.member("g7-0"), lake.member("g7-1", None)], [lake.member("g9-0")])
    # The validation channel and the topic before its recreation use the same batch numbers.
    lake.closed("v0-0", step("v0-0", 1))
    lake.batch(0, [lake.member("v0-0")], channel="val", topic="VV", n=1)
    lake.closed("old-0", step("old-0", 1))
    lake.batch(0, [lake.member("old-0"), lake.member("old-1")], topic="B0")
    # Trajectories that are refused, waiting, late and open.
    for key in ("g8-0", "w-0"):
        lake.closed(key, step(key, 1))
    refused = records.Refused(
        run_id=RUN, channel="train", group_id="g8", trajectory_ids=("g8-0",), revisions=(0,),
        whole_group=True, reason="zero_variance", detail="all 1.0", n=2, input_topic_id="CC",
        input_from=0, input_to=1,
    )  # fmt: skip
    lake.put("groups", "BB", refused)
    lake.put("steps", "SS", step("g8-0", 99), step("open-0", 1))
    mark = records.StepMark(
        event_id="m", run_id=RUN, trajectory_key="g8-0", trajectory_id="g8-0", step_id="g8-0~99.0",
        mark="late", evidence="closed as completed at 2000", offset=9,
    )  # fmt: skip
    lake.put("step_marks", "TT", mark)
    lake.put(
        "weights", "WW", version("0.0", None), version("1.0", "0.0", 0, 1),
        version("2.0", "1.0", 2, 3),
        version("2.1", "1.0", 2, 3), version("3.1", "2.1", 4, 5), version("4.1", "3.1", 6, 7),
    )  # fmt: skip
    for name, seq in (("1.0", 0), ("1.0", 1), ("2.0", 2), ("2.0", 3), ("2.1", 2), ("2.1", 3),
                      ("3.1", 4), ("3.1", 5)):  # fmt: skip
        pair = [f"g{seq}-{n}" for n in range(2)]
        lake.trained(name, seq, {k: {f"{k}~{n}.0": None for n in (1, 2)} for k in pair})
    g6_0 = ["retried", "left out by curation, or by policy 7", None, "no sampled tokens"]
    lake.trained("4.1", 6, {
        "g6-0": {f"g6-0~{n}.0": why for n, why in enumerate(g6_0)},
        "g6-1": {"g6-1~1.0": None},
        f"{session}~9": {f"{session}~{n}.0": "no training reward" for n in (9, 10)},
    })  # fmt: skip
    lake.trained("4.1", 7, {
        "g7-0": {"g7-0~1.0": "its group has fewer than 2 training rewards"},
        "g7-1": {"g7-1~1.0": "no training reward"},
    })  # fmt: skip
    return settings


def test_the_funnel_has_the_reason_of_the_surviving_version(tmp_path: Path) -> None:
    lake = Story(settings := Settings(data_dir=tmp_path))
    lake.closed("g0-0", step("g0-0", 1))
    lake.batch(0, [lake.member("g0-0")], n=1)
    versions = [version("0.0", None), version("1.0", "0.0", 0, 0), version("1.1", "0.0", 0, 0)]
    lake.put("weights", "WW", *versions)
    for name, why in (("1.1", "survived"), ("1.0", "abandoned")):
        lake.trained(name, 0, {"g0-0": {"g0-0~1.0": why}})
    query = "SELECT stage, lost_reason FROM funnel WHERE step_id = 'g0-0~1.0'"
    assert connect(settings).sql(query).fetchall() == [("admitted", "survived")]


@pytest.fixture
def lineage(settings: Settings) -> Lineage:
    return Lineage(connect(settings))


def ids(answer: dict[str, Any]) -> list[str]:
    return [
        s["step_id"]
        for b in answer["batches"]
        for g in b["groups"]
        for m in g["members"]
        for s in m["steps"]
    ]


@pytest.mark.slow
def test_a_version_names_every_step_that_made_it(lineage: Lineage) -> None:
    said = lineage.weights("r/3.1")
    assert [v["version_id"] for v in said["chain"]] == ["r/3.1", "r/2.1", "r/1.0", "r/0.0"]
    assert [(b["batch_seq"], [g["group_id"] for g in b["groups"]]) for b in said["batches"]] == [
        (4, ["g4"]),
        (5, ["g5"]),
    ]
    assert ids(said) == [f"g{b}-{m}~{s}.0" for b in (4, 5) for m in (0, 1) for s in (1, 2)]
    assert said["descendants"] == ["r/4.1"]
    assert {k: v for k, v in said["totals"].items() if k != "not_in_lake"} == {
        "batches": 2, "groups": 2, "trajectories": 4, "steps": 8, "trained_steps": 8,
        "trained_tokens": 24, "sampled_by": ["r/0.0"],
    }  # fmt: skip
    whole = lineage.weights("r/3.1", ancestors=True)
    assert [b["batch_seq"] for b in whole["batches"]] == [4, 5, 2, 3, 0, 1]
    assert {b["version_id"] for b in whole["batches"]} == {"r/3.1", "r/2.1", "r/1.0"}
    assert len(ids(whole)) == len(set(ids(whole))) == 24
    assert (
        lineage.weights("r/0.0")["batches"] == []
        and len(lineage.weights("r/0.0")["descendants"]) == 5
    )


@pytest.mark.slow
def test_an_attempt_that_was_lost_is_not_on_the_chain(lineage: Lineage) -> None:
    lost, kept = lineage.weights("r/2.0"), lineage.weights("r/2.1")
    assert ids(lost) == ids(kept) and len(ids(kept)) == 8
    assert (lost["version"]["surviving"], kept["version"]["surviving"]) == (False, True)
    assert (lost["descendants"], kept["descendants"]) == ([], ["r/3.1", "r/4.1"])
    (said,) = lineage.trajectory("g2-0")
    assert [(v["version_id"], v["surviving"]) for v in said["trained_by"]] == [
        ("r/2.0", False),
        ("r/2.1", True),
    ]
    assert said["verdict"] == "in batch 2 of channel train at revision 0, trained by r/2.1"


@pytest.mark.slow
def test_what_was_not_trained_says_why(lineage: Lineage) -> None:
    said = lineage.weights("r/4.1")
    members = {
        m["trajectory_id"]: m for b in said["batches"] for g in b["groups"] for m in g["members"]
    }
    session = next(k for k in members if k.startswith("anonymous"))
    assert [
        (s["trained"], s["untrained_reason"], s["sampled_by"], s["tags"])
        for s in members["g6-0"]["steps"]
    ] == [
        (False, "retried", ["r/1.0", "r/2.1"], []),
        (False, "left out by curation, or by policy 7", ["r/1.0", "r/2.1"], ["title"]),
        (True, None, ["r/1.0", "r/2.1"], []),
        (False, "no sampled tokens", ["r/1.0", "r/2.1"], []),
    ]
    assert members["g6-0"]["revision"] == 2 and members["g6-0"]["rewards"][0]["value"] == 1.0
    assert {s["untrained_reason"] for s in members[session]["steps"]} == {"no training reward"}
    assert (
        members["g7-0"]["steps"][0]["untrained_reason"]
        == "its group has fewer than 2 training rewards"
    )
    assert (members["g6-1"]["steps"][0]["trained"], said["totals"]["trained_steps"]) == (True, 2)
    assert said["totals"]["not_in_lake"] == ["g9-0"]
    (late,) = lineage.trajectory("g6-0")
    assert (
        late["late_revisions"] == [{"revision": 3, "missed_batch_seq": 6}]
        and len(late["steps"]) == 4
    )


@pytest.mark.slow
def test_what_lies_before_its_place(tmp_path: Path) -> None:
    """The lake has the first copy of a trajectory; the batch names the offset of the second copy.

    Assemble was killed after sending a trajectory and before recording that in its changelog.
    """
    settings = Settings(data_dir=tmp_path)
    lake = Story(settings)
    for key in ("g0-0", "g0-1"):
        lake.closed(key, *(step(key, n) for n in range(3)), parts=1 if key == "g0-0" else 2)
    lake.places = {"g0-0": 8, "g0-1": 2}
    lake.batch(0, [lake.member("g0-0"), lake.member("g0-1")])
    lake.put("weights", "WW", version("1.0", None, 0, 0))
    said = Lineage(connect(settings)).weights("r/1.0")
    assert len(ids(said)) == len(set(ids(said))) == 6 and said["totals"]["not_in_lake"] == []


@pytest.mark.slow
def test_what_became_of_a_step(lineage: Lineage) -> None:
    def verdict(step_id: str) -> str:
        (said,) = lineage.step(step_id)
        text: str = said["verdict"]
        return text

    assert verdict("g4-1~2.0") == "in batch 4 of channel train at revision 0, trained by r/3.1"
    assert verdict("g6-0~1.0").startswith(
        "not trained: left out by curation, or by policy 7; its trajectory is in batch 6"
    )
    assert verdict("anonymous-" + "0" * 32 + "~10.0").startswith("not trained: no training reward")
    assert verdict("g8-0~1.0") == "refused: zero_variance (all 1.0)"
    assert verdict("g8-0~99.0") == "late, so not trained: closed as completed at 2000"
    assert verdict("w-0~1.0") == "closed; neither admitted nor refused yet"
    assert verdict("open-0~1.0") == "its trajectory has not closed"
    assert (
        verdict("v0-0~1.0")
        == "in batch 0 of channel val at revision 0, which no version was trained on yet"
    )
    assert (
        verdict("old-0~1.0")
        == "in batch 0 of channel train at revision 0, which no version was trained on yet"
    )
    (said,) = lineage.step("g6-0~2.0")
    assert said["step"]["sampled_by"] == [
        {"version": "r/1.0", "first_token": 0, "end_token": 1},
        {"version": "r/2.1", "first_token": 1, "end_token": 3},
    ]  # fmt: skip
    assert [s["step_id"] for s in said["trajectory"]["steps"]] == ["g6-0~2.0"]


@pytest.mark.slow
def test_what_is_not_there(lineage: Lineage) -> None:
    for ask, why in (
        (lambda: lineage.weights("r/9.9"), "the lake has no version r/9.9"),
        (lambda: lineage.weights("nonsense"), "the lake has no version nonsense"),
        (lambda: lineage.step("nonsense"), "step id 'nonsense'"),
        (lambda: lineage.step("g0-0~1.0", "other"), "the lake has no step g0-0~1.0 of run other"),
        (
            lambda: lineage.trajectory("open-0"),
            "open-0 has not closed: the lake has 1 steps of its key",
        ),
        (lambda: lineage.trajectory("it's"), "the lake has no trajectory it's"),
        (lambda: lineage.run("other"), "the lake has nothing of run other"),
    ):
        with pytest.raises(NotInLake) as raised:
            ask()
        assert str(raised.value).startswith(why)


@pytest.mark.slow
def test_a_run_in_numbers(lineage: Lineage) -> None:
    said = lineage.run(RUN)
    assert (said["head"], said["versions"], said["surviving_versions"], said["abandoned"]) == (
        "r/4.1",
        6,
        5,
        ["r/2.0"],
    )
    assert {
        (b["channel"], b["batches_topic_id"]): (b["batches"], b["trained"])
        for b in said["batches"]
    } == {
        ("train", "BB"): (8, 8), ("train", "B0"): (1, 0), ("val", "VV"): (1, 0),
    }  # fmt: skip
    assert [(g["reason"], g["groups"]) for g in said["groups"] if not g["admitted"]] == [
        ("zero_variance", 1)
    ]
    assert said["late_revisions"] == 1


@pytest.mark.slow
def test_the_views(settings: Settings) -> None:
    sql = connect(settings)
    rows = sql.execute(
        "select version_id, count(*), sum(trained::int) from lineage_steps group by 1 order by 1"
    ).fetchall()
    assert rows == [
        ("r/1.0", 8, 8),
        ("r/2.0", 8, 8),
        ("r/2.1", 8, 8),
        ("r/3.1", 8, 8),
        ("r/4.1", 9, 2),
        (None, 2, 0),
    ]
    by = sql.execute(
        "select step_id, sampled_by from lineage_steps where version_id = 'r/4.1' and "
        "trained order by 1"
    ).fetchall()
    assert by == [("g6-0~2.0", ["r/1.0", "r/2.1"]), ("g6-1~1.0", ["r/0.0"])]
    stale = sql.execute(
        "select distinct channel, batch_seq, staleness from lineage_steps where "
        "batches_topic_id != 'B0' order by all"
    ).fetchall()
    assert stale == [*(("train", seq, seq // 2) for seq in range(8)), ("val", 0, None)]
    tokens = sql.execute(
        "select version, sum(end_token - first_token) from lineage_tokens group by 1 order by 1"
    ).fetchall()
    assert (
        Counter(dict(tokens)).total() == 3 * sql.execute("select count(*) from steps").fetchone()[0]
    )
    assert sql.execute("select count(*) from lineage_versions where surviving").fetchone() == (5,)


@pytest.mark.slow
def test_the_command(settings: Settings) -> None:
    def call(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["lineage", *words, f"data_dir={settings.data_dir}"])
        assert done.exit_code == code, (done.output, done.exception)
        return done.output

    lines = call("weights", "r/4.1").splitlines()
    assert lines[0] == "r/4.1: from r/3.1, batches 6 to 7"
    assert "      g6-0~2.0: 3 tokens trained, sampled by r/1.0, r/2.1" in lines
    assert "      its steps are not in the lake" in lines
    assert lines[-1] == (
        "2 batches, 3 groups, 6 trajectories, 2 of 9 steps trained with 6 tokens, sampled "
        "by r/0.0, r/1.0, r/2.1"
    )
    assert json.loads(call("weights", "r/4.1", "-f", "json"))["totals"]["steps"] == 9
    assert (
        "  trained r/2.0 (not on the surviving chain)\n  trained r/2.1, then r/3.1, r/4.1\n"
        in call("trajectory", "g2-0")
    )
    assert call("step", "g6-0~2.0").splitlines()[:2] == [
        "g6-0~2.0 of run r: in batch 6 of channel train at revision 2, trained by r/4.1",
        "  tokens 0 to 0 sampled by r/1.0",
    ]  # fmt: skip
    assert call("run", "r").startswith("run r: ")
    assert call("step", "nonsense", code=1).startswith("clawstream: step id 'nonsense'")


def test_no_lake(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["lineage", "run", "r", f"data_dir={tmp_path}"])
    assert (done.exit_code, "no lake at" in done.output) == (1, True)

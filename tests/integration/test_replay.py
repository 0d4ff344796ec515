"""Replays of a run that real jobs recorded, from topics and from the lake.

A replay gives the same batches, or other batches on request, whichever process is killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import pytest
from support.jobs import ROOT, Eventually, Jobs, reward, running, step
from support.patience import until
from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.demo.model import make_random_model
from clawstream.ops.replay.report import journal
from clawstream.ops.replay.run import (
    ReplayRequest,
    delete_replay,
    home_of,
    list_replays,
    replay_settings,
    run_replay,
)
from clawstream.ops.replay.target_prefix import PrefixTaken
from clawstream.ops.replay.verify import check, what_if
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import load, overrides_of
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    PolicyApplied,
    ReadyBatch,
    Step,
    Tick,
    WeightVersion,
)
from clawstream.schemas.settings import AdmitSettings, Settings
from clawstream.schemas.topics import CANDIDATE_PARTITIONS, partition_of
from clawstream.stream_jobs.admit.main import serve
from clawstream.stream_jobs.admit.policy_log import PolicyLog
from clawstream.stream_jobs.lake.delta.snapshots import take_snapshot
from clawstream.stream_jobs.lake.main import write
from clawstream.trainer.main import train

POLICY = {
    "group_size": 4,
    "batch_groups": 2,
    "required_rewards": ["rule"],
    "group_deadline_s": 300,
    "reward_deadline_s": 200,
}
RULES = {"run": ["exact_match@1"]}
GROUPS = 9


@dataclass
class Recorded:
    """A run recorded by real processes. marks: end offsets of all its topics."""

    settings: Settings
    cluster: Cluster
    marks: dict[str, dict[int, tuple[int, int]]]

    def last(self, settings: Settings | None = None) -> dict[str, Candidate]:
        """Return the last candidate of each trajectory, without its number."""
        s = settings or self.settings
        topic, codec, out = s.kafka.topics.candidates, Codec(), dict[str, Candidate]()
        for p in self.cluster.watermarks(topic):
            for r in self.cluster.read_all(topic, p):
                c = codec.decode(r.value)
                if isinstance(c, Candidate) and (
                    c.trajectory_id not in out or c.revision > out[c.trajectory_id].revision
                ):
                    out[c.trajectory_id] = c
        return {k: replace(c, revision=0) for k, c in out.items()}

    def untouched(self) -> bool:
        return self.marks == {t: self.cluster.watermarks(t) for t in self.marks}


def group(jobs: Jobs, number: int) -> list[Any]:
    """Return four conversations with their records interleaved as on a log.

    Half of the answers are correct by the metadata.
    """
    events: list[list[Any]] = []
    for member in range(4):
        key = f"{number}-{member}"
        said = b"x" if (number + member) % 3 else b"y"
        told = jobs.conversation(key, turns=1 + member % 2)
        told[0] = replace(told[0], group_id=f"g{number}")
        told = [
            replace(e, response_json=b'{"content":"' + said + b'"}') if isinstance(e, Step) else e
            for e in told
        ]
        # This reward never balances a rule's reward: the values of a group differ for any subset of
        # these rewards.
        told.insert(2, reward(key, member / 8))
        told[-1] = replace(
            told[-1], rewards={"end": member / 16}
        )  # nowhere else: its topic may be delayed
        events.append(told)
    return [e for at in range(max(map(len, events))) for one in events for e in one[at : at + 1]]


@pytest.fixture(scope="module")
def recorded(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Record nine groups with all tables.

    The run includes a restart of admission with another policy, late and revised rewards, and a
    straggler.
    """
    home = tmp_path_factory.mktemp("recorded")
    settings = Settings.model_validate({
        "run_id": "run", "data_dir": home,
        "kafka": {
            "bootstrap_servers": kafka, "topic_prefix": f"t{uuid4().hex[:10]}", "partitions": 4,
        },
        "jobs": {"reward_functions": RULES, "trajectory_timeout_s": 15, "tick_interval_s": 0.3},
        "admit": {"policy": POLICY, "channels": ["train"]}, "lake": {"flush_interval_s": 0.5},
    })  # fmt: skip
    cluster, stop, first = Cluster(kafka), threading.Event(), threading.Event()
    tuned = with_policy(settings, batch_groups=1)
    admission = threading.Thread(target=serve, args=(settings, first))
    second = threading.Thread(target=serve, args=(tuned, stop))
    lake = threading.Thread(target=write, args=(settings, stop))
    with running(settings, cluster, home) as jobs:
        jobs.start()
        jobs.start(job="reward")
        admission.start()
        lake.start()
        try:
            # Log time advances even without a working process.
            until(lambda: jobs.records(jobs.topics.candidates, Tick))
            _record_half(jobs, cluster, settings)
        finally:
            first.set()
            admission.join(180)
        second.start()
        try:
            until(lambda: len(jobs.records(jobs.topics.candidates, AdmissionPolicy)) == 2)
            _record_rest(jobs)
            _settle(jobs, cluster, settings)
            for worker in jobs.workers:
                worker.send_signal(signal.SIGTERM)
            assert [worker.wait(180) for worker in jobs.workers] == [0, 0]
            until(lambda: _lake_has_all(cluster, settings))
            until(
                lambda: _has_read(
                    cluster, settings, "admit.run.train", _ends(cluster, settings, "candidates")
                )
            )
        finally:
            stop.set()
            second.join(180)
            lake.join(180)
    mine = [t for t in cluster.topics() if t.startswith(f"{settings.kafka.topic_prefix}.")]
    # The marker of the last transaction comes a moment after its commit.
    until(
        lambda: all(
            cluster.watermarks(t) == cluster.watermarks(t, isolation="read_uncommitted")
            for t in mine
        )
    )
    yield Recorded(settings, cluster, {t: cluster.watermarks(t) for t in mine})


def _batches(cluster: Cluster, settings: Settings) -> list[ReadyBatch]:
    topic, codec = settings.kafka.topics.ready_batches(settings.run_id, "train"), Codec()
    if topic not in cluster.topics():
        return []
    return [
        b for r in cluster.read_all(topic) if isinstance(b := codec.decode(r.value), ReadyBatch)
    ]


def _record_half(jobs: Jobs, cluster: Cluster, settings: Settings) -> None:
    first = group(jobs, 0)
    jobs.put(*first, *group(jobs, 1), *group(jobs, 2), *group(jobs, 3))
    again = next(e for e in first if isinstance(e, Step))
    jobs.put(step("late", [1, 2], [3]), again)  # never completed; a producer's retry
    jobs.put(
        reward(
            "0-1",
            0.5,
            step_id=next(
                e.step_id for e in first if isinstance(e, Step) and e.trajectory_key == "0-1"
            ),
        )
    )
    jobs.producer.flush()
    until(lambda: len(_batches(cluster, settings)) >= 2)


def _record_rest(jobs: Jobs) -> None:
    for number in range(4, GROUPS):
        jobs.put(*group(jobs, number))
    jobs.put(
        replace(reward("5-1", 0.9), reward_revision=1),
        reward("6-0", -1.0),
    )
    jobs.producer.flush()


def _settle(jobs: Jobs, cluster: Cluster, settings: Settings) -> None:
    """Wait until all trajectories are closed and answered and the straggler has timed out.

    No reward waits to be folded.
    """
    until(lambda: len(jobs.candidates()) == 4 * GROUPS + 1)
    until(
        lambda: all(any(r.source == "rule" for r in c.rewards) for c in jobs.candidates().values())
    )
    until(lambda: len(_batches(cluster, settings)) >= 2 + GROUPS - 4)
    came = _ends(cluster, settings, "steps", "rewards")
    until(lambda: _has_read(cluster, settings, "assemble", came))


def _ends(cluster: Cluster, settings: Settings, *names: str) -> dict[tuple[str, int], int]:
    """Return the end offsets of these topics; of the candidates, only the run's partition."""
    topics = [f"{settings.kafka.topic_prefix}.{name}" for name in names]
    ends = {(t, p): high for t in topics for p, (_, high) in cluster.watermarks(t).items()}
    at = (
        settings.kafka.topics.candidates,
        partition_of(settings.run_id.encode(), CANDIDATE_PARTITIONS),
    )
    return {k: end for k, end in ends.items() if k[0] != at[0] or k == at}


def _has_read(
    cluster: Cluster, settings: Settings, group: str, ends: dict[tuple[str, int], int]
) -> bool:
    done = cluster.committed(f"{settings.kafka.topic_prefix}-{group}")
    return all(done.get(at, 0) >= end for at, end in ends.items())


def _lake_has_all(cluster: Cluster, settings: Settings) -> bool:
    return _has_read(
        cluster, settings, "lake", _ends(cluster, settings, "steps", "rewards", "trajectories")
    )


def hashes(report: dict[str, Any]) -> list[str]:
    return [b["content_hash"] for b in report["channels"]["train"]["batches"]]


def with_policy(settings: Settings, **policy: Any) -> Settings:
    tuned = settings.admit.policy.model_copy(update=policy)
    return settings.model_copy(
        update={"admit": settings.admit.model_copy(update={"policy": tuned})}
    )


def test_recorded_candidates_give_the_recorded_batches(recorded: Recorded) -> None:
    report = check(recorded.settings, "train")
    assert (
        report["first_difference"] is None and report["batches"] >= 7 and report["not_checked"] == 0
    )
    assert {b["admission_policy_version"] for b in report["recorded"]["batches"]} == {1, 2}
    assert report["recorded"] == report["replayed"]
    said = CliRunner().invoke(app, ["replay", "check", *overrides_of(recorded.settings)])
    assert (
        said.exit_code == 0
        and f"all {report['batches']} batches came again, in order" in said.output
    )
    said = CliRunner().invoke(
        app, ["replay", "check", *overrides_of(recorded.settings), "run_id=nobody"]
    )
    assert said.exit_code == 1 and "there is no topic" in said.stderr
    other = what_if(with_policy(recorded.settings, batch_groups=3), "train")
    assert other["recorded"] == report["recorded"]
    assert [b["groups"] for b in other["replayed"]["batches"]] == [3, 3, 3]
    one_field = AdmitSettings.model_validate({"policy": {"batch_groups": 3}})
    changed = what_if(recorded.settings.model_copy(update={"admit": one_field}), "train")
    assert changed["replayed"] == other["replayed"]
    assert recorded.untouched()


def test_topics_again_and_again_and_with_other_rewards(recorded: Recorded) -> None:
    settings = recorded.settings
    one, two = (run_replay(settings, ReplayRequest(name)) for name in ("one", "two"))
    assert hashes(one) == hashes(two) and len(hashes(one)) >= 4
    assert (
        one["trajectories"] == {"completed": 4 * GROUPS, "timed_out": 1}
        and one["open"] == one["waiting"] == 0
    )
    assert one["answers"] == 4 * GROUPS + 1
    target = replay_settings(settings, "one", "run", 4)
    assert recorded.last(target) == recorded.last()  # 13(a): times and outcomes too
    assert run_replay(settings, ReplayRequest("one")) == {**one, "was_done": True}
    with pytest.raises(PrefixTaken, match="another request"):
        run_replay(with_policy(settings, batch_groups=5), ReplayRequest("one"))

    jobs = settings.jobs.model_copy(
        update={"reward_functions": {"*": (f"{ROOT}/tests/support/rewards.py:contrary@2",)}}
    )
    other = run_replay(settings.model_copy(update={"jobs": jobs}), ReplayRequest("other"))
    assert len(hashes(other)) >= 4 and not set(hashes(other)) & set(hashes(one))
    # A request without functions and policy gets the run's own policy, not groups decided before
    # their rewards.
    words = [w for w in overrides_of(settings) if not w.startswith(("admit=", "jobs="))]
    command = [
        sys.executable,
        "-m",
        "clawstream",
        "replay",
        "run",
        "again",
        *words,
        'admit={"channels": ["train"]}',
    ]
    told = subprocess.run(
        [*command, "--format", "json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    again = json.loads(told.stdout)
    assert len(hashes(again)) >= 4 and again["answers"] == 0
    bare = settings.jobs.model_copy(
        update={"reward_functions": {"*": (f"{ROOT}/tests/support/own_functions.py:fails@1",)}}
    )
    failed = run_replay(
        with_policy(settings, required_rewards=None).model_copy(update={"jobs": bare}),
        ReplayRequest("bare"),
    )
    ((reason, count),) = failed["no_rewards"].items()
    assert hashes(failed) == [] and count == 4 * GROUPS + 1
    assert reason.startswith("ValueError: no (") and reason.endswith("own_functions.py, line 46)")
    kept = run_replay(settings, ReplayRequest("kept", keep_rules=True, with_steps=True))
    steps = sum(high for _, high in recorded.cluster.watermarks("replay-kept.steps").values())
    assert steps == kept["steps"] + 2 * 4 * GROUPS  # opened and completed
    assert kept["answers"] == 0 and kept["candidates"] > one["candidates"]
    assert recorded.last(replay_settings(settings, "kept", "run", 4)) == recorded.last()
    last = recorded.last().values()
    # few, because all records of one append have the same time
    distinct = sorted({c.closed_at for c in last})
    middle = distinct[len(distinct) // 2]
    part = run_replay(settings, ReplayRequest("part", until_ms=middle, stay_open=True))
    # Includes the straggler if it timed out before the second half.
    assert part["trajectories"] == Counter(c.outcome for c in last if c.closed_at < middle)
    assert "run_ended" not in part["channels"]["train"]["refused"]
    assert [r["name"] for r in list_replays(settings)] == [
        "again",
        "bare",
        "kept",
        "one",
        "other",
        "part",
        "two",
    ]
    said = CliRunner().invoke(app, ["replay", "list", *overrides_of(settings)])
    assert said.exit_code == 0 and said.output.count("from topics") == 7
    assert recorded.untouched()


def test_one_field_of_the_policy_changes_and_the_others_are_those_recorded(
    recorded: Recorded,
) -> None:
    given = AdmitSettings.model_validate({"policy": {"batch_groups": 3}, "channels": ["train"]})
    settings = recorded.settings.model_copy(update={"admit": given})
    report = run_replay(settings, ReplayRequest("onefield", as_run="other"))
    target = replay_settings(settings, "onefield", "other", 4)
    topic = target.kafka.topics.ready_batches("other", "train")
    decoder = Decoder(recorded.cluster, target.kafka.topics.schemas)
    records = list(journal(recorded.cluster, decoder, topic))
    (applied,) = (record for record in records if isinstance(record, PolicyApplied))
    newest = PolicyLog(recorded.settings, recorded.cluster).newest
    assert newest is not None and newest.policy.batch_groups == 1
    assert applied.policy == replace(
        newest.policy,
        run_id="other",
        policy_version=1,
        batch_groups=3,
        required_rewards=("rule/exact_match",),  # of the functions that the replay asks
        published_by=applied.policy.published_by,
        created_at=applied.policy.created_at,
    )
    assert report["channels"]["train"]["batches"][0]["groups"] == 3
    assert report["channels"].keys() == {"train"}


def test_pinned_lake_trains_a_model(
    recorded: Recorded, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = recorded.settings
    table_versions = take_snapshot(settings)["versions"]
    # The lake has four partitions.
    few = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"partitions": 2})})
    from_topics, from_lake = (
        run_replay(settings, ReplayRequest("t2")),
        run_replay(few, ReplayRequest("lake", table_versions=table_versions)),
    )
    assert hashes(from_lake) == hashes(from_topics)
    assert from_lake["versions"].items() <= table_versions.items()
    target = replay_settings(settings, "lake", "run", 4)
    assert (
        recorded.last(target)
        == recorded.last(replay_settings(settings, "t2", "run", 4))
        == recorded.last()
    )

    written = load(home_of(settings, "lake") / "settings.yaml", environ={})
    # The recorded tokens name versions of attempt 0, so a trainer of the replay uses another
    # attempt.
    above = target.trainer.model_copy(update={"first_attempt": 1})
    assert written == target.model_copy(update={"trainer": above})

    renamed = run_replay(
        settings, ReplayRequest("offline", table_versions=table_versions, as_run="exp")
    )
    assert len(hashes(renamed)) == len(hashes(from_lake))
    model = make_random_model(tmp_path_factory.mktemp("model") / "m")
    offline = replay_settings(settings, "offline", "exp", 4)
    first_attempt = load(
        home_of(settings, "offline") / "settings.yaml", environ={}
    ).trainer.first_attempt
    tuned = offline.trainer.model_copy(
        update={
            "model_path": model, "device": "cpu", "lr": 1e-3, "max_versions": 2,
            "first_attempt": first_attempt
        }
    )  # fmt: skip
    stop = threading.Event()
    patience = threading.Timer(300, stop.set)
    patience.daemon = True
    patience.start()
    train(offline.model_copy(update={"trainer": tuned}), stop)
    decoder = Decoder(recorded.cluster, offline.kafka.topics.schemas)
    versions = [
        decoder.decode(r.value) for r in recorded.cluster.read_all(offline.kafka.topics.weights)
    ]
    assert all(isinstance(v, WeightVersion) for v in versions)
    assert [v.version_id for v in versions] == ["exp/0.1", "exp/1.1", "exp/2.1"]
    assert versions[-1].batches_topic_id == renamed["channels"]["train"]["topic_id"]
    assert versions[-1].metrics["tokens"] > 0
    assert not any("logp_max_abs_diff_same_version" in version.metrics for version in versions)
    assert recorded.untouched()


def test_one_command_trains_from_a_pinned_lake(
    recorded: Recorded, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = recorded.settings
    state = take_snapshot(settings)
    pinned = state["versions"]["trajectories"]
    model = make_random_model(tmp_path_factory.mktemp("model") / "m")
    trained = []
    for name in ("from-lake-1", "from-lake-2"):
        done = subprocess.run(
            die_with_parent([
                sys.executable, "-m", "clawstream", "train", "--from-lake",
                "where=group_id <> 'g3'", f"version={state['at']}", f"name={name}",
                *overrides_of(settings), f"trainer.model_path={model}", "trainer.device=cpu",
                "trainer.lr=1e-3", "trainer.threads=1", "trainer.max_versions=2",
            ]),
            cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "nanobind" not in done.stderr
        assert f"trajectories {pinned}" in done.stdout
        target = replay_settings(settings, name, name, 4)
        batches = _batches(recorded.cluster, target)
        assert {g.group_id for b in batches for g in b.groups} == {
            f"g{number}" for number in range(GROUPS) if number != 3
        }
        decoder = Decoder(recorded.cluster, target.kafka.topics.schemas)
        topic = target.kafka.topics.weights
        versions = [decoder.decode(r.value) for r in recorded.cluster.read_all(topic)]
        assert [v.version_id for v in versions] == [f"{name}/{i}.1" for i in range(3)]
        trained.append(
            [{f.sha256 for f in v.files if f.url.endswith(".safetensors")} for v in versions]
        )
    # The same data and settings give the same weights, and training changes them.
    assert trained[0] == trained[1]
    assert trained[0][0] != trained[0][1] != trained[0][2]
    assert recorded.untouched()


@pytest.mark.long
def test_killed_replay_begins_again(recorded: Recorded, eventually: Eventually) -> None:
    settings, cluster = recorded.settings, recorded.cluster
    prefix = f"replay-k{uuid4().hex[:6]}"
    name = prefix.removeprefix("replay-")
    command = [sys.executable, "-m", "clawstream", "replay", "run", name, *overrides_of(settings)]
    # The kills hit its assemble phase and its admission phase.
    for topic in ("candidates", "ready-batches.run.train"):
        process = subprocess.Popen(die_with_parent(command), cwd=ROOT, stdout=subprocess.DEVNULL)
        eventually(lambda t=topic: f"{prefix}.{t}" in cluster.topics(), 60)
        process.kill()
        process.wait()
    done = subprocess.run([*command, "--format", "json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert hashes(report) == hashes(run_replay(settings, ReplayRequest("k0")))
    assert delete_replay(settings, name) > 9
    assert not any(t.startswith(prefix) for t in cluster.topics())

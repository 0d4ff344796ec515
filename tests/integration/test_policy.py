"""The policy of a continuing run, changed from the command line.

Other tests cover the run's end and an unreadable journal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.inspection.policies import RunPolicies
from clawstream.query.live_lake import LiveLake
from clawstream.runtime.exit_codes import EXIT_SOURCE, exit_code
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import Decoder, create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import AdmissionPolicy, PolicyApplied, RunEnded, Tick
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import CANDIDATE_PARTITIONS, partition_of
from clawstream.stream_jobs.admit.admitter import ChannelAdmitter
from clawstream.stream_jobs.admit.main import publish_policy
from clawstream.stream_jobs.admit.policy import Published, policy_of
from clawstream.stream_jobs.errors import PolicyRefused, UnreadableJournal

ROOT = Path(__file__).parents[2]
CODEC = Codec()
Cli = Callable[..., Result]
Admit = Callable[[Settings], "subprocess.Popen[bytes]"]


def with_policy(settings: Settings, **changes: Any) -> Settings:
    policy = settings.admit.policy.model_copy(update=changes)
    return settings.model_copy(
        update={"run_id": "demo", "admit": settings.admit.model_copy(update={"policy": policy})}
    )


@pytest.fixture
def cli(settings: Settings) -> Cli:
    """Return a function that runs a command with the cluster's settings."""
    return lambda *words: CliRunner().invoke(app, [*words, *overrides_of(settings)])


@pytest.fixture
def admit(tmp_path: Path) -> Iterator[Admit]:
    """Run admission as a separate process that ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(settings: Settings) -> subprocess.Popen[bytes]:
        with (tmp_path / "admit.log").open("ab") as log:
            command = [sys.executable, "-m", "clawstream", "admit", *overrides_of(settings)]
            started.append(
                subprocess.Popen(die_with_parent(command), cwd=ROOT, stdout=log, stderr=log)
            )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def read(cluster: Cluster, topic: str, kind: type) -> list[Any]:
    partition = partition_of(b"demo", CANDIDATE_PARTITIONS) if topic.endswith(".candidates") else 0
    found = (
        [CODEC.decode(r.value) for r in cluster.read_all(topic, partition)]
        if topic in cluster.topics()
        else []
    )
    return [e for e in found if isinstance(e, kind)]


def test_a_person_sets_the_policy_of_a_run_that_goes_on(
    settings: Settings, cluster: Cluster, cli: Cli, admit: Admit, eventually: Any
) -> None:
    away = cli("policy", "show", "--run", "demo")
    assert away.exit_code == 2 and "is kafka.topic_prefix right?" in away.stderr
    create_topics(cluster, settings)
    topics = settings.kafka.topics
    none = cli("policy", "set", "batch_groups=2", "--run", "demo")
    assert none.exit_code == 2 and "run demo has no policy yet" in none.stderr
    assert cli("policy", "show", "--run", "demo").exit_code == 1
    mine = with_policy(settings, batch_groups=3)
    process = admit(mine)
    journal = topics.ready_batches("demo", "train")

    def applied() -> list[AdmissionPolicy]:
        return [a.policy for a in read(cluster, journal, PolicyApplied)]

    eventually(lambda: len(applied()) == 1)
    wrong = cli("policy", "set", "min_quality=7", "--run", "demo")
    assert (
        wrong.exit_code == 2
        and "setting admit.policy.min_quality: Input should be less than" in wrong.stderr
    )
    unknown = cli("policy", "set", "colour=red", "--run", "demo")
    assert (
        unknown.exit_code == 2 and "no colour in a policy; there are group_size," in unknown.stderr
    )
    lacking = cli("policy", "set", "algorithm=magic", "--run", "demo")
    assert (
        lacking.exit_code == 2
        and "admit.policy.algorithm='magic': this trainer has cispo" in lacking.stderr
    )
    fixed = cli("policy", "set", "sync_every=4", "--run", "demo")
    assert fixed.exit_code == 2 and "sync_every is 1 for the whole run, not 4" in fixed.stderr
    done = cli("policy", "set", "min_quality=0.5", "batch_groups=7", "--run", "demo", "--by", "ann")
    assert done.exit_code == 0, done.stderr
    assert "policy 2 of demo, by ann" in done.stdout and "batch_groups: 3 -> 7" in done.stdout
    newest = eventually(lambda: [p for p in applied() if p.policy_version == 2])[0]
    assert (newest.batch_groups, newest.min_quality, newest.published_by) == (7, 0.5, "ann")
    eventually(lambda: "train: in force" in cli("policy", "show", "--run", "demo").stdout)
    process.terminate()
    assert process.wait(180) == 0

    process = admit(mine)  # the same settings: ann's change stays
    producer = cluster.producer()
    producer.put(
        topics.candidates,
        None,
        CODEC.encode(Tick(partition=0, event_time=1)),
        partition=partition_of(b"demo", 4),
    )
    producer.flush()
    group = f"{settings.kafka.topic_prefix}-admit.demo.train"
    at = (topics.candidates, partition_of(b"demo", CANDIDATE_PARTITIONS))
    eventually(
        lambda: cluster.committed(group).get(at) == cluster.watermarks(at[0], [at[1]])[at[1]][1]
    )
    assert [p.policy_version for p in applied()] == [1, 2]
    process.terminate()
    assert process.wait(180) == 0
    process = admit(with_policy(settings, batch_groups=4))  # other settings: they apply again
    eventually(
        lambda: (
            [(p.policy_version, p.batch_groups, p.min_quality) for p in applied()][-1]
            == (3, 4, None)
        )
    )

    history = json.loads(
        cli("policy", "show", "--history", "--run", "demo", "--format", "json").stdout
    )
    assert [
        (h["policy"]["policy_version"], h["policy"]["published_by"], h["rejection"])
        for h in history
    ] == [
        (1, "settings", None), (2, "ann", None), (3, "settings", None),
    ]  # fmt: skip
    told = cli("policy", "show", "--history", "--run", "demo").stdout
    assert "policy 2 of demo, by ann" in told and "batch_groups=4, min_quality=null" in told

    assert cli("run", "end", "demo").exit_code == 1 and not read(
        cluster, topics.candidates, RunEnded
    )
    assert "there is no run other" in cli("run", "end", "other", "--yes").stderr
    ended = cli("run", "end", "demo", "--yes", "--reason", "done")
    assert ended.exit_code == 0 and "run demo ends at offset" in ended.stdout
    assert [e.reason for e in read(cluster, topics.candidates, RunEnded)] == ["done"]
    assert "run demo has ended" in cli("run", "end", "demo", "--yes").stderr
    assert "run demo has ended" in cli("policy", "set", "batch_groups=1", "--run", "demo").stderr


def test_the_inspector_publishes_a_policy_as_the_command_does(
    settings: Settings, cluster: Cluster, cli: Cli
) -> None:
    create_topics(cluster, settings, [settings.kafka.topics.ready_batches_spec("demo", "train")])
    first = with_policy(settings, batch_groups=3)
    decoder = Decoder(cluster, settings.kafka.topics.schemas)
    publish_policy(first, cluster, decoder, ChannelAdmitter(first, "train", cluster, decoder))
    policies = RunPolicies(settings, cluster, LiveLake(settings, {}), lambda: True)
    assert policies.of("other") is None
    seen = policies.of("demo")
    assert seen is not None and seen.behind == {"train": None, "val": None}
    assert (seen.newest.version, seen.newest.settings["batch_groups"]) == (1, 3)
    assert policies.changed("demo", {"min_quality": "0.5"}).settings["min_quality"] == 0.5
    assert policies.publish("demo", {"min_quality": "0.5"}, "ann", 1) == 2
    with pytest.raises(PolicyRefused, match="ann has set policy 2 since"):
        policies.publish("demo", {"min_quality": "0.75"}, "bob", 1)
    with pytest.raises(PolicyRefused, match="no field is changed"):
        policies.publish("demo", {}, "bob", 2)
    with pytest.raises(SettingsError, match=r"admit\.policy\.min_quality"):
        policies.publish("demo", {"min_quality": "7"}, "bob", 2)
    told = cli("policy", "show", "--history", "--run", "demo").stdout
    assert "policy 2 of demo, by ann" in told and "min_quality=0.5" in told


def test_settings_whose_version_someone_else_has_taken_are_published_with_the_next_one(
    settings: Settings, cluster: Cluster
) -> None:
    create_topics(cluster, settings)
    topics, first, then = (
        settings.kafka.topics,
        with_policy(settings),
        with_policy(settings, batch_groups=5),
    )
    create_topics(cluster, settings, [topics.ready_batches_spec("demo", "train")])
    decoder = Decoder(cluster, topics.schemas)

    class Raced(ChannelAdmitter):
        """An admitter; another user sets policy 2 between its read and its write."""

        rival: AdmissionPolicy | None = policy_of(
            with_policy(settings, batch_groups=9), 2, 0, "ann"
        )

        def published(self) -> Published:
            seen = super().published()
            if seen.newest is not None and self.rival is not None:
                producer = cluster.producer()
                producer.put(topics.candidates, b"demo", CODEC.encode(self.rival))
                producer.flush()
                self.rival = None
            return seen

    publish_policy(first, cluster, decoder, ChannelAdmitter(first, "train", cluster, decoder))
    admitter = Raced(then, "train", cluster, decoder)
    publish_policy(then, cluster, decoder, admitter)
    said = [
        (p.policy_version, p.batch_groups, p.published_by)
        for p in read(cluster, topics.candidates, AdmissionPolicy)
    ]
    assert said == [(1, 16, "settings"), (2, 9, "ann"), (2, 5, "settings"), (3, 5, "settings")]
    newest = admitter.published().newest
    assert newest is not None and newest.policy_version == 3
    publish_policy(then, cluster, decoder, admitter)
    assert len(read(cluster, topics.candidates, AdmissionPolicy)) == len(said), (
        "nothing is due any more"
    )


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"garbage", "an operator must look"),
        (b"\xc3\x01unknown-fingerprint", "A newer release has written it"),
        (CODEC.encode(RunEnded(run_id="demo", created_at=0)), "a RunEnded is no decision"),
    ],
    ids=["garbage", "newer", "foreign"],
)  # fmt: skip
def test_a_journal_that_cannot_be_read_stops_admission(
    settings: Settings, cluster: Cluster, value: bytes, why: str
) -> None:
    """If admission skipped the record, it would decide the same groups twice."""
    mine, topics = with_policy(settings), settings.kafka.topics
    create_topics(cluster, mine, [topics.ready_batches_spec("demo", "train")])
    producer = cluster.producer()
    producer.put(topics.ready_batches("demo", "train"), b"demo", value, partition=0)
    producer.flush()
    with pytest.raises(UnreadableJournal, match=why) as e:
        ChannelAdmitter(mine, "train", cluster, Decoder(cluster, topics.schemas))
    assert exit_code(e.value) == EXIT_SOURCE and "offset 0" in str(e.value)

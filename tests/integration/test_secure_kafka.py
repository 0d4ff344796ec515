"""The processes on a Kafka with TLS, SCRAM and ACLs; the user of each has only its own ACLs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
from fastapi.testclient import TestClient
from support.jobs import RUN
from support.lake import column
from support.otlp import Receiver, receiving
from support.ports import free_port
from support.processes import Processes
from support.secure_broker import PASSWORD, SecureBroker, secure_broker
from support.up import ENVIRON, command

from clawstream.cli.lake.inspect import parts_of
from clawstream.inspector.marks.mark import Mark, Target
from clawstream.inspector.web.app import create_app
from clawstream.runtime.exit_codes import EXIT_SETTINGS
from clawstream.runtime.kafka import Denied
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.access import PROCESSES, Acl, acls_of, check_access
from clawstream.runtime.topics.records import Decoder, cluster_of, create_topics, now_micros
from clawstream.schemas.settings import Settings
from clawstream.trainer.data.batches import BatchReader
from clawstream.trainer.liveness.watchdog import Watchdog
from clawstream.trainer.position import starting_position
from clawstream.trainer.versions.weight_log import KafkaWeightLog

RUN_ID = "demo"
JOBS = ("assemble", "reward", "compare", "admit", "lake")
EQUAL = {
    "type": "genrm", "per": "group", "url": "http://127.0.0.1:9", "model": "m", "rubric": "r",
    "template": "It asks nothing about equal members.",
}  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    with secure_broker(tmp_path_factory.mktemp("secure")) as made:
        for process in PROCESSES:
            made.add_user(process, acls_of(process, "claw"))
        yield made


@pytest.fixture
def settings_of(broker: SecureBroker, tmp_path: Path) -> Callable[..., Settings]:
    """Return `settings_of(user, **security)`; all users work on one installation."""
    port = free_port()

    def made(user: str, **security: Any) -> Settings:
        return Settings.model_validate(
            {
                "data_dir": tmp_path,
                "run_id": RUN_ID,
                "kafka": {**broker.kafka(user, **security), "partitions": 2},
                "gateway": {"port": port, "upstreams": ["http://127.0.0.1:9"]},
                "jobs": {
                    "tick_interval_s": 0.3,
                    "quality_functions": {"*": ["tokens@1"]},
                    "reward_models": {"equal": EQUAL},
                    "reward_functions": {"*": ["equal@1"]},
                },
                "admit": {"policy": {"group_size": 2, "batch_groups": 1}},
                "lake": {"flush_interval_s": 0.1},
            }
        )

    return made


def a_step(trajectory: str, reward: float) -> dict[str, Any]:
    """Return a whole trajectory of one step of group g, as Claw-R1 submits it."""
    return {
        "trajectory_uid": trajectory, "prompt_uid": "g", "prompt_ids": [1, 2], "response_ids": [3],
        "rollout_log_probs": [-0.5], "step_index": 0, "policy_version": 0, "is_last": True,
        "reward": reward,
    }  # fmt: skip


@pytest.mark.long
def test_the_pipeline_needs_no_other_permissions(
    settings_of: Callable[..., Settings], tmp_path: Path, eventually: Any
) -> None:
    operator, receiver = settings_of("operator"), Receiver()
    create_topics(cluster_of(operator), operator)
    with Processes(tmp_path / "logs") as processes, receiving(receiver) as port:
        gateway = settings_of("gateway")
        processes.start("gateway", command("gateway", *overrides_of(gateway)), env=ENVIRON)
        for job in JOBS:
            words = overrides_of(settings_of(job))
            processes.start(job, [sys.executable, "-c", RUN.format(job), *words])
        words = [f"traces.endpoint=http://127.0.0.1:{port}"]
        words += ["traces.calls_without_context=own_trace", *overrides_of(settings_of("traces"))]
        processes.start("traces", command("traces", *words), env=ENVIRON)
        url = f"http://127.0.0.1:{gateway.gateway.port}"

        def submitted() -> bool:
            assert not [p for p in processes.started if p.poll() is not None], logs(processes)
            steps = [a_step("t0", 0.0), a_step("t1", 1.0)]
            try:
                return httpx.post(f"{url}/submit_steps", json={"steps": steps}).is_success
            except httpx.TransportError:
                return False

        eventually(submitted)
        with first_batch(settings_of("trainer")) as batch:
            assert sorted(eventually(batch)) == ["t0", "t1"], logs(processes)
        eventually(lambda: len(receiver.named("admit")) == 2)
        for table in ("steps", "trajectories", "assessments", "batches"):
            eventually(lambda table=table: column(operator, table, "run_id"))
        change_in_inspector(settings_of("inspector"), eventually)
        eventually(lambda: column(operator, "curation", "note") == ["good"])
        assert "authorization" not in logs(processes) and PASSWORD not in logs(processes)
    rollout = settings_of("rollout")
    check_access(cluster_of(rollout), rollout, "rollout")


@contextmanager
def first_batch(settings: Settings) -> Iterator[Callable[[], Collection[str]]]:
    """Return a function for the trajectories of the first batch, read as the trainer does.

    It returns none before there is a batch.
    """
    cluster, topics = cluster_of(settings), settings.kafka.topics
    create_topics(
        cluster, settings, [topics.ready_batches_spec(RUN_ID, c) for c in ("train", "val")]
    )
    check_access(cluster, settings, "trainer")
    weights = KafkaWeightLog(cluster, topics, RUN_ID)
    position = starting_position(cluster, topics.ready_batches(RUN_ID, "train"), None)
    reader = BatchReader(
        cluster,
        settings,
        Decoder(cluster, topics.schemas),
        position,
        None,
        lambda _: None,
        Watchdog(),
        weights.dead_letter,
    )

    def trajectories() -> Collection[str]:
        fetched = reader.next(0, 0.1)
        return () if fetched is None else fetched.trajectories.keys()

    yield trajectories
    reader.close()
    weights.close()


def change_in_inspector(settings: Settings, eventually: Any) -> None:
    """Follow the topics, mark t0, set a policy and watch the lag, as the inspector's pages do."""
    check_access(cluster_of(settings), settings, "inspector")
    parts, live, _ = parts_of(settings)
    with TestClient(create_app(parts)):
        eventually(lambda: live.source == "Kafka" and live.rows())
        mark, target = Mark("ann", note="good"), Target(RUN_ID, "t0")
        parts.marks.write(list(mark.events(target, now_micros())))
        assert parts.policies.publish(RUN_ID, {"min_quality": "0.5"}, "ann", 1) == 2
        found = parts.policies.of(RUN_ID)
        assert found is not None and found.newest.version == 2 and "train" in found.behind
        watched = eventually(lambda: parts.operations.latest)
        assert watched.kafka_error is None and watched.dead_letters == 0
        groups = {
            c.group.partition("-")[2].partition(".")[0] for c in watched.consumers if c.status
        }
        assert {"assemble", "reward", "admit", "lake"} <= groups


def logs(processes: Processes) -> str:
    return "".join(processes.log(name) for name in ("gateway", *JOBS, "traces"))


def test_a_refused_connection_ends_a_command_with_the_remedy(
    settings_of: Callable[..., Settings], tmp_path: Path
) -> None:
    wrong = {
        "kafka.security.user, password": settings_of("operator", password="wrong-secret"),
        "kafka.security.ca_file": settings_of("operator", ca_file=Path(certifi.where())),
    }
    with Processes(tmp_path / "logs") as processes:
        for remedy, settings in wrong.items():
            processes.start(remedy, command("topics", "list", *overrides_of(settings)), env=ENVIRON)
        codes = [process.wait() for process in processes.started]
        said = {remedy: processes.log(remedy) for remedy in wrong}
    assert codes == [EXIT_SETTINGS] * 2, said
    for remedy, text in said.items():
        assert remedy in text and "Traceback" not in text and "secret" not in text


def test_a_missing_acl_is_named(settings_of: Callable[..., Settings], broker: SecureBroker) -> None:
    operator, nobody = settings_of("operator"), settings_of("poor")
    create_topics(cluster_of(operator), operator)
    some = [
        Acl("topic", "claw.", ("Describe",), prefixed=True),
        Acl("topic", "claw.steps", ("Read",)),
        Acl("topic", "claw.schemas", ("Write",)),
    ]
    broker.add_user("poor", some)
    cluster = cluster_of(nobody)
    with pytest.raises(Denied, match="user poor may not") as error:
        check_access(cluster, nobody, "assemble")
    assert "Write on topic claw.steps" in str(error.value)
    assert "Read on topic claw.steps" not in str(error.value)
    assert "`clawstream topics acls assemble --user poor`" in str(error.value)
    with pytest.raises(Denied, match="clawstream topics acls"):
        cluster.producer("claw-trainer.x")
    producer = cluster.producer()
    producer.put("claw.steps", b"k", b"v")
    with pytest.raises(Denied, match="clawstream topics acls"):
        producer.flush()

"""Topics that a user has created beforehand are refused early, with a remedy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource
from support.jobs import Eventually, running, step

from clawstream.ops.replay.target_prefix import TargetPrefix
from clawstream.runtime.exit_codes import EXIT_SETTINGS
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings

ROOT = Path(__file__).parents[2]
RUN = (
    "import sys; from clawstream.runtime.process.config import load; "
    "from clawstream.stream_jobs.assemble.main import main; "
    "main(load(overrides=sys.argv[1:]))"
)


def altered(cluster: Cluster, topic: str, config: dict[str, str]) -> None:
    """Alter a topic's configuration as kafka-configs does."""
    entries = [
        ConfigEntry(n, v, incremental_operation=AlterConfigOpType.SET) for n, v in config.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    for future in cluster.admin.incremental_alter_configs([resource]).values():
        future.result()


def test_topics_made_by_hand_are_refused_until_they_are_mended(
    cluster: Cluster, settings: Settings, eventually: Eventually
) -> None:
    topics = settings.kafka.topics
    # Valid: the producers' timestamps by default, and a limit above the required one.
    cluster.create_topic(topics.steps, 4, {"max.message.bytes": "20000000"})
    cluster.create_topic(
        topics.workers,
        1,
        {"message.timestamp.type": "LogAppendTime", "max.message.bytes": "1000000"},
    )
    cluster.create_topic(
        topics.rewards,
        3,
        {"message.timestamp.type": "LogAppendTime", "max.message.bytes": "20000000"},
    )
    with pytest.raises(SettingsError) as refused:
        create_topics(cluster, settings)
    said = str(refused.value).splitlines()
    assert said[:6] == [
        f"topic {topics.steps}: message.timestamp.type is CreateTime, must be LogAppendTime",
        f"topic {topics.steps}: retention.ms is 604800000, must be 2592000000 or more",
        f"topic {topics.rewards}: partitions is 3, must be 4",
        f"topic {topics.rewards}: retention.ms is 604800000, must be -1",
        f"topic {topics.workers}: cleanup.policy is delete, must be compact",
        f"topic {topics.workers}: max.message.bytes is 1000000, must be 10485760 or more",
    ], said
    assert len(cluster.topics().keys() & {s.name for s in topics.specs(4, -1)}) == 3, (
        "nothing was made"
    )
    for run in (
        [sys.executable, "-c", RUN],
        [sys.executable, "-m", "clawstream", "topics", "create"],
    ):
        done = subprocess.run(
            [*run, *overrides_of(settings)], cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == EXIT_SETTINGS and "must be LogAppendTime" in done.stderr, (
            done.stderr
        )

    cluster.delete_topic(topics.rewards)
    commands = [line for line in said if line.startswith("mend it:")]
    assert len(commands) == 3
    for line in commands:
        found = re.search(r"--entity-name (\S+) --add-config (\S+)$", line)
        assert found is not None and f"--bootstrap-server {settings.bootstrap_servers} " in line
        if found[1] == topics.rewards:
            continue  # deleted, because its partitions could not be repaired
        altered(cluster, found[1], dict(pair.split("=") for pair in found[2].split(",")))

    def made() -> list[str]:
        try:
            return create_topics(cluster, settings)
        except SettingsError:
            return []  # a broker learns of it a moment later

    assert topics.rewards in eventually(made)
    assert create_topics(cluster, settings) == []


def test_a_replay_keeps_its_times_and_a_clock_that_is_ahead_is_told_of(
    cluster: Cluster, settings: Settings, eventually: Eventually, tmp_path: Path
) -> None:
    target = settings.model_copy(update={"data_dir": tmp_path})
    jobs_settings = settings.jobs.model_copy(update={"write_ticks": False})
    topics, prefix = settings.kafka.topics, settings.kafka.topic_prefix
    TargetPrefix(cluster, prefix, tmp_path / "replay.json").make(
        target.model_copy(update={"jobs": jobs_settings}), (topics.steps, topics.rewards)
    )
    with pytest.raises(SettingsError, match=r"jobs\.write_ticks=false"):
        create_topics(cluster, target)
    with running(target, cluster, tmp_path, write_ticks=False) as jobs:
        # Kafka refuses timestamps more than an hour ahead of its own clock.
        ahead = int(time.time() * 1000) + 1_800_000
        for _ in range(2):
            value = jobs.codec.encode(step("k", [1], [2]))
            jobs.producer.put(jobs.topics.steps, b"k", value, partition=0, timestamp_ms=ahead)
            jobs.producer.flush()
        jobs.start()
        log = tmp_path / "assemble-0.log"
        eventually(lambda: "clock_ahead" in log.read_text())
        told = [json.loads(line) for line in log.read_text().splitlines() if "clock_ahead" in line]
        assert [t["level"] for t in told] == ["warning"] and 600 < told[0]["ahead_s"] <= 1800

"""The lake writer as a process on a real Kafka.

The tests kill it at random, send duplicates, and truncate or recreate its topics.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake
from support.lake import Eventually, Writers, a_reward, a_step, column, put_steps, running
from support.positions import tell

from clawstream.runtime.exit_codes import EXIT_FENCED, EXIT_SOURCE
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas import records
from clawstream.schemas.codec.single_object import TOP_LEVEL, Codec
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.schemas.tokens import pack_logprobs
from clawstream.stream_jobs.lake.lookup import LakeBehind, check_not_behind
from clawstream.stream_jobs.lake.main import Lake, dataset, open_table
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.trainer.versions.weight_log import KafkaWeightLog


@pytest.fixture
def processes(settings: Settings) -> Iterator[Writers]:
    with running(settings) as made:
        yield made


def test_killed_at_random_under_duplicates_nothing_is_lost_or_doubled(
    settings: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    rng, codec, producer = random.Random(7), Codec(), cluster.producer()
    topics = settings.kafka.topics
    sent = 0
    writer = processes.write(flush_interval_s=0.05, flush_rows=50)
    for round_ in range(4):
        for _ in range(20):
            numbers = list[int]()
            for _ in range(60):
                numbers.append(sent)
                sent += 1
                if rng.random() < 0.2:  # a repeated output or a drained spool: same id, new offset
                    numbers.append(rng.randrange(max(0, sent - 2000), sent))
            put_steps(producer, settings, numbers)
            event = records.SessionEvent(
                event_id=f"e{sent}",
                run_id="r",
                trajectory_key=f"k{sent % 17}",
                kind="opened",
                created_at=sent,
            )
            producer.put(topics.steps, event.trajectory_key.encode(), codec.encode(event))
            producer.put(
                topics.steps,
                None,
                codec.encode(records.Tick(partition=sent % 4)),
                partition=sent % 4,
            )
            producer.put(topics.rewards, b"k", codec.encode(a_reward(sent)))
            producer.flush()
            time.sleep(rng.random() * 0.03)
        eventually(lambda least=round_ * 500: len(column(settings, "steps", "step_id")) > least)
        time.sleep(rng.random() * 0.5)
        writer.kill()
        writer.wait()
        writer = processes.write(
            flush_interval_s=rng.uniform(0.02, 0.3), flush_rows=rng.choice([7, 60, 400, 5000])
        )
    # The last writer may find no other record, so this one is reserved for it.
    put_steps(producer, settings, [sent])
    sent += 1
    producer.close()
    eventually(lambda: len(set(column(settings, "steps", "step_id"))) == sent)
    eventually(lambda: len(column(settings, "rewards", "event_id")) == 80)
    ends = {(topics.steps, p): high for p, (_, high) in cluster.watermarks(topics.steps).items()}
    group = f"{settings.kafka.topic_prefix}-lake"
    # The last records are duplicates and ticks.
    eventually(lambda: ends.items() <= cluster.committed(group).items())
    assert processes.stop(writer) == 0
    rows = column(settings, "steps", "step_id")
    assert sorted(rows) == sorted(a_step(i).step_id for i in range(sent))
    opened = column(settings, "session_events", "event_id")
    assert len(opened) == len(set(opened)) == 80
    assert len(column(settings, "rewards", "event_id")) == len(
        set(column(settings, "rewards", "event_id"))
    )
    lengths = [len(ids) for ids in column(settings, "steps", "prompt_token_ids")]
    assert sorted(lengths) == sorted(i % 50 for i in range(sent))
    committed = cluster.committed(group)
    assert {tp: committed[tp] for tp in ends} == ends


def test_a_new_table_reads_its_topic_again_and_no_other_table_doubles(
    settings: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    """Read far more records again than the window of ids holds.

    One partition has new records, the other partitions only records that are read again.
    """
    create_topics(cluster, settings)
    codec, producer = Codec(), cluster.producer()
    put_steps(producer, settings, range(400))
    opened = records.SessionEvent(
        event_id="e", run_id="r", trajectory_key="k1", kind="opened", created_at=1
    )
    producer.put(settings.kafka.topics.steps, b"k1", codec.encode(opened))
    producer.flush()
    writer = processes.write(flush_interval_s=0.1, dedupe_window=1)
    eventually(lambda: len(column(settings, "steps", "step_id")) == 400)
    eventually(lambda: len(column(settings, "session_events", "event_id")) == 1)
    assert processes.stop(writer) == 0
    # as if an older release had created the lake
    shutil.rmtree(f"{settings.lake_uri}/session_events")
    put_steps(producer, settings, range(400, 450))
    writer = processes.write(flush_interval_s=0.01, flush_rows=20, dedupe_window=1)
    eventually(lambda: len(set(column(settings, "steps", "step_id"))) == 450)
    eventually(lambda: column(settings, "session_events", "event_id") == ["e"])
    assert processes.stop(writer) == 0
    assert sorted(column(settings, "steps", "step_id")) == sorted(
        a_step(n).step_id for n in range(450)
    )
    producer.close()


def test_how_far_another_lake_is_says_nothing_of_this_one(
    settings: Settings, cluster: Cluster
) -> None:
    """Two lakes on one Kafka commit to one group."""
    create_topics(cluster, settings)
    topic, group, producer = (
        settings.kafka.topics.steps,
        f"{settings.kafka.topic_prefix}-lake",
        cluster.producer(),
    )
    put_steps(producer, settings, range(30))
    producer.close()
    ends = {(topic, p): high for p, (_, high) in cluster.watermarks(topic).items()}
    lake = Lake(settings.lake_uri, {}, 40)
    lake.acquire()
    small = settings.model_copy(update={"lake": LakeSettings(dedupe_window=40)})
    for name in ("steps", "session_events", "failed_calls"):
        start = {(cluster.topic_id(topic), p): 1 for _, p in ends}
        lake.append(name, [], start, lambda *_: None, commit_offsets=True)
    tell(cluster, group, ends)
    assert cluster.committed(group) == ends
    with pytest.raises(LakeBehind, match="records behind on"):
        check_not_behind(small, cluster, topic)
    for name in ("steps", "session_events", "failed_calls"):
        lake.append(
            name,
            [],
            {(cluster.topic_id(topic), p): end for (_, p), end in ends.items()},
            lambda *_: None,
            commit_offsets=True,
        )
    check_not_behind(small, cluster, topic)


def test_poison_new_topics_and_a_topic_made_anew(
    settings: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    topics, codec = settings.kafka.topics, Codec()
    writer = processes.write(flush_interval_s=0.2)
    producer = cluster.producer()
    for topic in (
        topics.steps,
        topics.rewards,
        topics.trajectories,
        topics.candidates,
        topics.weights,
        topics.trained_tokens,
        topics.dead_letters,
    ):
        producer.put(topic, b"k", b"\xc3\x01 poison", partition=0)
        producer.put(topic, b"k", b"rubbish", partition=0)
        producer.put(
            topic, b"k", codec.encode(records.RunEnded(run_id="r", created_at=1)), partition=0
        )
    producer.put(topics.rewards, b"k", codec.encode(a_reward(1)), partition=0)
    endless = records.Trajectory(
        run_id="r", trajectory_key="k", trajectory_id="k", group_id="g", channel="train",
        outcome="completed", opened_at=1, closed_at=2**62, part=0, parts=1, segments=(), steps=(),
    )  # fmt: skip
    first = records.WeightVersion(
        version_id="r/0.1", run_id="r", sync_index=0, attempt=1, format="full", files=(),
        channel="train", metrics={"loss": 0.5}, created_at=1,
    )  # fmt: skip
    trained = [
        records.TrainedTokens(
            run_id="r", trajectory_key=key, trajectory_id=key, step_id=f"{key}~0.0",
            version_id="r/0.1", batch_seq=0, updates=0, logprobs=pack_logprobs([-0.5]),
            advantages=pack_logprobs([1.0]),
        )
        for key in ("a", "b", "c")
    ]  # fmt: skip
    # No column can hold that time.
    producer.put(topics.trajectories, b"k", codec.encode(endless), partition=0)
    producer.flush()
    weight_log = KafkaWeightLog(cluster, topics, "r")
    weight_log.publish(first, trained)
    weight_log.close()
    eventually(lambda: column(settings, "rewards", "event_id") == ["w1"])
    eventually(lambda: column(settings, "weights", "metrics") == [[("loss", 0.5)]])
    eventually(lambda: len(column(settings, "trained_tokens", "step_id")) == len(trained))
    assert column(settings, "trained_tokens", "logprobs") == [[-0.5]] * len(trained)
    eventually(lambda: column(settings, "run_events", "kind") == ["ended"])
    # The lake dead-letters values that no column can hold, and invalid records of topics that no
    # other process reads.
    eventually(lambda: len(column(settings, "dead_letters", "process")) >= 10)
    letters = zip(
        *(column(settings, "dead_letters", c) for c in ("topic", "reason", "process")), strict=True
    )
    poisoned = [
        (t, r, "lake")
        for t in (topics.weights, topics.trained_tokens, topics.dead_letters)
        for r in ("undecodable",) * 2 + ("invalid",)
    ]
    assert sorted(letters) == sorted([*poisoned, (topics.trajectories, "invalid", "lake")])
    assert codec.encode(endless) in column(settings, "dead_letters", "value")
    assert column(settings, "trajectories", "run_id") == []
    eventually(lambda: len(column(settings, "schemas", "fingerprint")) == len(TOP_LEVEL))

    # a ready-batches topic that appears while the writer runs is read from its start
    spec = topics.ready_batches_spec("r", "train")
    cluster.create_topic(spec.name, spec.partitions, spec.config)
    admit = cluster.producer("admit")
    with admit.transaction():
        for seq in range(3):
            admit.put(spec.name, b"r", codec.encode(a_batch(seq)))
    eventually(lambda: sorted(column(settings, "batches", "batch_seq")) == [0, 1, 2])
    # Each table has its own commit.
    eventually(lambda: sorted(column(settings, "groups", "batch_seq")) == [0, 1, 2])

    # recreated while the writer runs: another id, a new position, and the rows of both stay
    cluster.delete_topic(topics.rewards)
    cluster.delete_topic(spec.name)
    eventually(lambda: not {topics.rewards, spec.name} & cluster.topics().keys())
    create_topics(cluster, settings, [spec])
    # w1 is a repeated reward with a known id; batch 0 of the new topic is another batch.
    for number in (1, 2):
        producer.put(topics.rewards, b"k", codec.encode(a_reward(number)), partition=0)
    with admit.transaction():
        admit.put(spec.name, b"r", codec.encode(a_batch(0)))
    producer.flush()
    eventually(lambda: sorted(column(settings, "rewards", "event_id")) == ["w1", "w2"])
    eventually(lambda: sorted(column(settings, "batches", "batch_seq")) == [0, 0, 1, 2])
    assert len(set(column(settings, "batches", "kafka_topic_id"))) == 2
    assert writer.poll() is None
    assert processes.stop(writer) == 0


def a_batch(seq: int) -> records.ReadyBatch:
    return records.ReadyBatch(
        run_id="r", channel="train", batch_seq=seq,
        groups=(records.BatchGroup(group_id="g", round=seq, n=2, members=()),), policy_version=1,
        sync_every=1, algorithm="grpo", reward_weights={}, input_topic_id="C", input_partition=0,
        input_from=0, input_to=1, content_hash="h", trainable_tokens=0, created_at_event_time=1000,
    )  # fmt: skip


def test_truncated_source_and_second_writer_end_with_their_codes(
    settings: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    producer, topics = cluster.producer(), settings.kafka.topics
    older = processes.write(flush_interval_s=0.1)
    put_steps(producer, settings, [1])
    eventually(lambda: len(column(settings, "steps", "step_id")) == 1)
    newer = processes.write(flush_interval_s=0.1)
    eventually(lambda: processes.log("lake").count("lake_follows") >= 12)
    put_steps(producer, settings, [2])
    assert older.wait(180) == EXIT_FENCED
    eventually(lambda: len(column(settings, "steps", "step_id")) == 2)
    assert processes.stop(newer) == 0
    assert "took over" in processes.log("lake")

    # positions before the log's start: the lake has never seen the deleted records
    (partition,) = [p for p, (_, high) in cluster.watermarks(topics.steps).items() if high > 0][:1]
    put_steps(producer, settings, range(3, 60))
    end = cluster.watermarks(topics.steps)[partition][1]
    cluster.delete_records(topics.steps, partition, end)
    assert processes.write().wait(180) == EXIT_SOURCE
    assert f"source truncated: {topics.steps}-{partition} starts at {end}" in processes.log("lake")


def test_position_past_the_end_is_truncation(
    settings: Settings, cluster: Cluster, processes: Writers
) -> None:
    create_topics(cluster, settings)
    topic = settings.kafka.topics.weights
    table = catalog()["weights"]
    mark = Transaction(f"weights:{cluster.topic_id(topic)}:0", 5)
    write_deltalake(
        f"{settings.lake_uri}/weights",
        table.arrow([]),
        commit_properties=CommitProperties(app_transactions=[mark]),
    )
    assert processes.write().wait(180) == EXIT_SOURCE
    assert f"source truncated: {topic}-0 ends at 0, position 5" in processes.log("lake")


def test_new_fields_reach_the_tables_and_old_rows_stay_readable(
    settings: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    """Rows of an older release have fewer columns, and fewer fields in the structs of a list."""
    create_topics(cluster, settings)
    old = [
        {
            "step_id": "old~1.0",
            "run_id": "r",
            "tags": [{"name": "n"}],
            "kafka_topic_id": "T",
            "kafka_timestamp": 5,
        }
    ]
    fields = [
        catalog()["steps"].schema.field(n)
        for n in ("step_id", "run_id", "kafka_topic_id", "kafka_timestamp")
    ]
    tags = pa.field("tags", pa.list_(pa.struct([("name", pa.string())])))
    write_deltalake(
        f"{settings.lake_uri}/steps", pa.Table.from_pylist(old, schema=pa.schema([*fields, tags]))
    )
    writer = processes.write(flush_interval_s=0.1)
    producer = cluster.producer()
    put_steps(producer, settings, [1])
    eventually(lambda: len(column(settings, "steps", "step_id")) == 2)
    assert processes.stop(writer) == 0
    rows = dataset(open_table(settings.lake_uri, "steps", {}), {}).to_table().to_pylist()
    by_id = {r["step_id"]: r for r in rows}
    assert by_id["old~1.0"]["tags"] == [{"name": "n", "evidence": None}]
    assert by_id["old~1.0"]["model"] is None
    assert by_id["k1~00000001.0"]["prompt_token_ids"] == [0]


def test_a_scan_that_stops_early_does_not_crash_at_exit(tmp_path: Path) -> None:
    write_deltalake(
        str(tmp_path / "t"), pa.table({"x": list(range(400_000)), "y": ["text" * 20] * 400_000})
    )
    code = (
        "import sys; from clawstream.stream_jobs.lake.main import dataset, open_table\n"
        "d = dataset(open_table(sys.argv[1], 't', {}), {})\n"
        "assert d.head(5).num_rows == 5\n"
        "import duckdb; c = duckdb.connect(); c.register('t', d); "
        "print(c.execute('select x from t limit 5').fetchall())\n"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            timeout=240,
            env=dict(os.environ),
        )
        assert done.returncode == 0, done.stderr.decode()

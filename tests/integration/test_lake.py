"""The lake writer as a process, on a real Kafka: killed at random, fed duplicates, its topics truncated or made anew."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from runtime.config import words_of
from runtime.kafka import Cluster, Producer
from runtime.lifecycle import EXIT_FENCED, EXIT_SOURCE
from runtime.records import create_topics
from schemas import events
from schemas.codec import TOP_LEVEL, Codec
from schemas.settings import LakeSettings, Settings
from schemas.tokens import pack_ids
from stream_jobs.lake import Lake, dataset, open_table
from stream_jobs.lake_lookup import LakeBehind, check_not_behind
from stream_jobs.lake_tables import catalog

CODE = """
import sys
from runtime.config import load
from stream_jobs.lake import main
main(load(None, sys.argv[1:], {}))
"""
Eventually = Callable[..., Any]


class Writers:
    """Lake writers of one installation, as child processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = settings.data_dir / "lake.log"

    def start(self, **lake: Any) -> subprocess.Popen[bytes]:
        words = [*words_of(self.settings), *(f"lake.{k}={v}" for k, v in lake.items())]
        with self.log.open("ab") as log:
            self.started.append(subprocess.Popen([sys.executable, "-c", CODE, *words], stderr=log, stdout=log))
        return self.started[-1]

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(30)


@pytest.fixture
def writers(settings: Settings) -> Iterator[Writers]:
    out = Writers(settings)
    yield out
    for process in out.started:
        if process.poll() is None:
            process.kill()
        process.wait(60)
    print(out.log.read_text() if out.log.exists() else "")


def column(settings: Settings, table: str, name: str) -> list[Any]:
    uri = settings.lake_uri
    if not DeltaTable.is_deltatable(f"{uri}/{table}"):
        return []
    return dataset(open_table(uri, table, {}), {}).to_table(columns=[name]).column(name).to_pylist()  # type: ignore[no-any-return]


def a_step(number: int) -> events.Step:
    key = f"k{number % 17}"
    return events.Step(
        step_id=f"{key}~{number:08d}.0", run_id="r", trajectory_key=key, call_id=f"{key}~{number:08d}", choice_index=0,
        protocol="openai.chat", model="policy", status="ok", streamed=False, request_json=b"{}", response_json=b"{}",
        prompt_token_ids=pack_ids(range(number % 50)), gateway_id="g", received_at=number, finished_at=number,
    )  # fmt: skip


def put_step(producer: Producer, settings: Settings, codec: Codec, number: int) -> None:
    step = a_step(number)
    producer.put(settings.kafka.topics.steps, step.trajectory_key.encode(), codec.encode(step))


def test_killed_at_random_under_duplicates_nothing_is_lost_or_doubled(
    settings: Settings, cluster: Cluster, writers: Writers, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    rng, codec, producer = random.Random(7), Codec(), cluster.producer()
    topics = settings.kafka.topics
    sent = 0
    writer = writers.start(flush_interval_s=0.05, flush_rows=50)
    for round_ in range(4):
        for _ in range(20):
            for _ in range(60):
                put_step(producer, settings, codec, sent)
                sent += 1
                if rng.random() < 0.2:  # a re-sent output or a drained spool: same id, new offset
                    put_step(producer, settings, codec, rng.randrange(max(0, sent - 2000), sent))
            event = events.SessionEvent(
                event_id=f"e{sent}", run_id="r", trajectory_key=f"k{sent % 17}", kind="opened", created_at=sent
            )
            producer.put(topics.steps, event.trajectory_key.encode(), codec.encode(event))
            producer.put(topics.steps, None, codec.encode(events.Tick(partition=sent % 4)), partition=sent % 4)
            producer.put(topics.rewards, b"k", codec.encode(a_reward(sent)))
            producer.flush()
            time.sleep(rng.random() * 0.03)
        eventually(lambda least=round_ * 500: len(column(settings, "steps", "step_id")) > least, 60)
        time.sleep(rng.random() * 0.5)
        writer.kill()
        writer.wait()
        writer = writers.start(flush_interval_s=rng.uniform(0.02, 0.3), flush_rows=rng.choice([7, 60, 400, 5000]))
    producer.close()
    eventually(lambda: len(set(column(settings, "steps", "step_id"))) == sent, 60)
    eventually(lambda: len(column(settings, "rewards", "event_id")) == 80, 30)
    assert writers.stop(writer) == 0
    rows = column(settings, "steps", "step_id")
    assert sorted(rows) == sorted(a_step(i).step_id for i in range(sent))
    opened = column(settings, "session_events", "event_id")
    assert len(opened) == len(set(opened)) == 80
    assert len(column(settings, "rewards", "event_id")) == len(set(column(settings, "rewards", "event_id")))
    lengths = [len(ids) for ids in column(settings, "steps", "prompt_token_ids")]
    assert sorted(lengths) == sorted(i % 50 for i in range(sent))
    ends = {(topics.steps, p): high for p, (_, high) in cluster.watermarks(topics.steps).items()}
    committed = cluster.committed(f"{settings.kafka.topic_prefix}-lake")
    assert {tp: committed[tp] for tp in ends} == ends


def a_reward(number: int, **changes: Any) -> events.Reward:
    values: dict[str, Any] = {
        "event_id": f"w{number}", "run_id": "r", "trajectory_key": "k", "source": "rule", "name": "f",
        "function_version": "1", "value": float(number), "reward_revision": 0, "created_at": number,
    }  # fmt: skip
    return events.Reward(**values | changes)


def test_a_new_table_reads_its_topic_again_and_no_other_table_doubles(
    settings: Settings, cluster: Cluster, writers: Writers, eventually: Eventually
) -> None:
    """Far beyond the window of ids; what is new on one partition comes with what is read again of the others."""
    create_topics(cluster, settings)
    codec, producer = Codec(), cluster.producer()
    for number in range(400):
        put_step(producer, settings, codec, number)
    opened = events.SessionEvent(event_id="e", run_id="r", trajectory_key="k1", kind="opened", created_at=1)
    producer.put(settings.kafka.topics.steps, b"k1", codec.encode(opened))
    producer.flush()
    writer = writers.start(flush_interval_s=0.1, dedupe_window=1)
    eventually(lambda: len(column(settings, "steps", "step_id")) == 400)
    eventually(lambda: len(column(settings, "session_events", "event_id")) == 1)
    assert writers.stop(writer) == 0
    shutil.rmtree(f"{settings.lake_uri}/session_events")  # as if an older release had made the lake
    for number in range(400, 450):
        put_step(producer, settings, codec, number)
    producer.flush()
    writer = writers.start(flush_interval_s=0.01, flush_rows=20, dedupe_window=1)
    eventually(lambda: len(set(column(settings, "steps", "step_id"))) == 450)
    eventually(lambda: column(settings, "session_events", "event_id") == ["e"])
    assert writers.stop(writer) == 0
    assert sorted(column(settings, "steps", "step_id")) == sorted(a_step(n).step_id for n in range(450))
    producer.close()


def test_how_far_another_lake_is_says_nothing_of_this_one(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    """Two lakes on one Kafka commit to one group."""
    create_topics(cluster, settings)
    topic, group, producer = settings.kafka.topics.steps, f"{settings.kafka.topic_prefix}-lake", cluster.producer()
    for number in range(30):
        put_step(producer, settings, Codec(), number)
    producer.flush()
    producer.close()
    ends = {(topic, p): high for p, (_, high) in cluster.watermarks(topic).items()}
    lake = Lake(settings.lake_uri, {}, 40)
    lake.claim()
    small = settings.model_copy(update={"lake": LakeSettings(dedupe_window=40)})
    for name in ("steps", "session_events"):
        start = {(cluster.topic_id(topic), p): 1 for _, p in ends}
        lake.append(name, [], start, lambda *_: None, mark=True)
    other = cluster.reader(group, {})
    other.commit(ends)
    eventually(lambda: other.poll(1, 0.1) or cluster.committed(group) == ends)
    other.close()
    with pytest.raises(LakeBehind, match="records behind on"):
        check_not_behind(small, cluster, topic)
    for name in ("steps", "session_events"):
        lake.append(
            name, [], {(cluster.topic_id(topic), p): end for (_, p), end in ends.items()}, lambda *_: None, mark=True
        )
    check_not_behind(small, cluster, topic)


def test_poison_new_topics_and_a_topic_made_anew(
    settings: Settings, cluster: Cluster, writers: Writers, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    topics, codec = settings.kafka.topics, Codec()
    writer = writers.start(flush_interval_s=0.2)
    producer = cluster.producer()
    for topic in (
        topics.steps,
        topics.rewards,
        topics.trajectories,
        topics.candidates,
        topics.weights,
        topics.dead_letters,
    ):
        producer.put(topic, b"k", b"\xc3\x01 poison", partition=0)
        producer.put(topic, b"k", b"rubbish", partition=0)
        producer.put(topic, b"k", codec.encode(events.RunEnded(run_id="r", created_at=1)), partition=0)
    producer.put(topics.rewards, b"k", codec.encode(a_reward(1)), partition=0)
    endless = events.Trajectory(
        run_id="r", trajectory_key="k", trajectory_id="k", group_id="g", channel="train", outcome="completed",
        opened_at=1, closed_at=2**62, part=0, parts=1, segments=(), steps=(),
    )  # fmt: skip
    first = events.WeightVersion(
        version_id="r/0.1", run_id="r", sync_index=0, attempt=1, format="full", files=(), channel="train",
        metrics={"loss": 0.5}, created_at=1,
    )  # fmt: skip
    producer.put(topics.trajectories, b"k", codec.encode(endless), partition=0)  # no column can hold that time
    producer.put(topics.weights, b"r/0.1", codec.encode(first))
    producer.flush()
    eventually(lambda: column(settings, "rewards", "event_id") == ["w1"])
    eventually(lambda: column(settings, "weights", "metrics") == [[("loss", 0.5)]])
    eventually(lambda: column(settings, "run_events", "kind") == ["ended"])
    # The lake buries what no column can hold, and what is wrong on topics that no other process works on.
    eventually(lambda: len(column(settings, "dead_letters", "process")) >= 7)
    letters = zip(*(column(settings, "dead_letters", c) for c in ("topic", "reason", "process")), strict=True)
    poisoned = [
        (t, r, "lake") for t in (topics.weights, topics.dead_letters) for r in ("undecodable",) * 2 + ("invalid",)
    ]
    assert sorted(letters) == sorted([*poisoned, (topics.trajectories, "invalid", "lake")])
    assert codec.encode(endless) in column(settings, "dead_letters", "value")
    assert column(settings, "trajectories", "run_id") == []
    assert len(column(settings, "schemas", "fingerprint")) == len(TOP_LEVEL)

    # a ready-batches topic that appears while the writer runs is read from its start
    spec = topics.ready_batches_spec("r", "train")
    cluster.create_topic(spec.name, spec.partitions, spec.config)
    admit = cluster.producer("admit")
    with admit.transaction():
        for seq in range(3):
            admit.put(spec.name, b"r", codec.encode(a_batch(seq)))
    eventually(lambda: sorted(column(settings, "batches", "batch_seq")) == [0, 1, 2])
    # Each table is a commit of its own.
    eventually(lambda: sorted(column(settings, "groups", "batch_seq")) == [0, 1, 2])

    # made anew while the writer runs: another id, a new position, the rows of both stay
    cluster.delete_topic(topics.rewards)
    cluster.delete_topic(spec.name)
    eventually(lambda: not {topics.rewards, spec.name} & cluster.topics().keys())
    create_topics(cluster, settings, [spec])
    for number in (1, 2):  # w1 was kept before: a re-sent reward; batch 0 of the new topic is another batch
        producer.put(topics.rewards, b"k", codec.encode(a_reward(number)), partition=0)
    with admit.transaction():
        admit.put(spec.name, b"r", codec.encode(a_batch(0)))
    producer.flush()
    eventually(lambda: sorted(column(settings, "rewards", "event_id")) == ["w1", "w2"], 60)
    eventually(lambda: sorted(column(settings, "batches", "batch_seq")) == [0, 0, 1, 2], 60)
    assert len(set(column(settings, "batches", "kafka_topic_id"))) == 2
    assert writer.poll() is None
    assert writers.stop(writer) == 0


def a_batch(seq: int) -> events.ReadyBatch:
    return events.ReadyBatch(
        run_id="r", channel="train", batch_seq=seq, groups=(events.BatchGroup(group_id="g", round=seq, n=2, members=()),),
        policy_version=1, sync_every=1, algorithm="grpo", reward_weights={}, input_topic_id="C", input_partition=0,
        input_from=0, input_to=1, content_hash="h", trainable_tokens=0, created_at_event_time=1000,
    )  # fmt: skip


def test_truncated_source_and_second_writer_end_with_their_codes(
    settings: Settings, cluster: Cluster, writers: Writers, eventually: Eventually
) -> None:
    create_topics(cluster, settings)
    codec, producer, topics = Codec(), cluster.producer(), settings.kafka.topics
    older = writers.start(flush_interval_s=0.1)
    put_step(producer, settings, codec, 1)
    producer.flush()
    eventually(lambda: len(column(settings, "steps", "step_id")) == 1)
    newer = writers.start(flush_interval_s=0.1)
    eventually(lambda: writers.log.read_text().count("lake_follows") >= 12)
    put_step(producer, settings, codec, 2)
    producer.flush()
    assert older.wait(30) == EXIT_FENCED
    eventually(lambda: len(column(settings, "steps", "step_id")) == 2)
    assert writers.stop(newer) == 0
    assert "took over" in writers.log.read_text()

    # positions before the log's start: records are gone that the lake has never seen
    (partition,) = [p for p, (_, high) in cluster.watermarks(topics.steps).items() if high > 0][:1]
    for number in range(3, 60):
        put_step(producer, settings, codec, number)
    producer.flush()
    end = cluster.watermarks(topics.steps)[partition][1]
    cluster.delete_records(topics.steps, partition, end)
    assert writers.start().wait(30) == EXIT_SOURCE
    assert f"source truncated: {topics.steps}-{partition} starts at {end}" in writers.log.read_text()


def test_position_past_the_end_is_truncation(settings: Settings, cluster: Cluster, writers: Writers) -> None:
    create_topics(cluster, settings)
    topic = settings.kafka.topics.weights
    table = catalog()["weights"]
    from deltalake import CommitProperties, Transaction

    mark = Transaction(f"weights:{cluster.topic_id(topic)}:0", 5)
    write_deltalake(
        f"{settings.lake_uri}/weights", table.arrow([]), commit_properties=CommitProperties(app_transactions=[mark])
    )
    assert writers.start().wait(30) == EXIT_SOURCE
    assert f"source truncated: {topic}-0 ends at 0, position 5" in writers.log.read_text()


def test_new_fields_reach_the_tables_and_old_rows_stay_readable(
    settings: Settings, cluster: Cluster, writers: Writers, eventually: Eventually
) -> None:
    """Rows of an older release: fewer columns, fewer fields in the structs of a list."""
    create_topics(cluster, settings)
    old = [{"step_id": "old~1.0", "run_id": "r", "tags": [{"name": "n"}], "kafka_topic_id": "T", "kafka_timestamp": 5}]
    fields = [catalog()["steps"].schema.field(n) for n in ("step_id", "run_id", "kafka_topic_id", "kafka_timestamp")]
    tags = pa.field("tags", pa.list_(pa.struct([("name", pa.string())])))
    write_deltalake(f"{settings.lake_uri}/steps", pa.Table.from_pylist(old, schema=pa.schema([*fields, tags])))
    writer = writers.start(flush_interval_s=0.1)
    producer, codec = cluster.producer(), Codec()
    put_step(producer, settings, codec, 1)
    producer.flush()
    eventually(lambda: len(column(settings, "steps", "step_id")) == 2)
    assert writers.stop(writer) == 0
    rows = dataset(open_table(settings.lake_uri, "steps", {}), {}).to_table().to_pylist()
    by_id = {r["step_id"]: r for r in rows}
    assert by_id["old~1.0"]["tags"] == [{"name": "n", "evidence": None}]
    assert by_id["old~1.0"]["model"] is None
    assert by_id["k1~00000001.0"]["prompt_token_ids"] == [0]


def test_a_scan_that_stops_early_does_not_crash_at_exit(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "t"), pa.table({"x": list(range(400_000)), "y": ["text" * 20] * 400_000}))
    code = (
        "import sys; from stream_jobs.lake import dataset, open_table\n"
        "d = dataset(open_table(sys.argv[1], 't', {}), {})\n"
        "assert d.head(5).num_rows == 5\n"
        "import duckdb; c = duckdb.connect(); c.register('t', d); print(c.execute('select x from t limit 5').fetchall())\n"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60, env=dict(os.environ)
        )
        assert done.returncode == 0, done.stderr.decode()

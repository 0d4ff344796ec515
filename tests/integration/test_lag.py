"""Lag of every group on a real Kafka.

Ticks and control records are not counted as work; all other records are.
"""

from __future__ import annotations

import pytest
from support.positions import tell

from clawstream.ops.lag import backlogs, data_lag, format_lag, lag
from clawstream.runtime.kafka import Cluster, Commit, CommitMetadata
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas import records
from clawstream.schemas.codec.single_object import TOP_LEVEL, Codec
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of

ENDED = records.RunEnded(run_id="default", created_at=1)


def commit(cluster: Cluster, group: str, topic: str) -> None:
    """Commit the ends of a topic, as a reader at the end does."""
    ends = {(topic, p): high for p, (_, high) in cluster.watermarks(topic).items()}
    reader = cluster.reader(group, {tp: max(0, end - 1) for tp, end in ends.items()})
    while not reader.at_end:
        reader.poll(100, 0.5)
    assert reader.positions == ends
    reader.close()
    tell(cluster, group, ends)


def wait_for_end(cluster: Cluster, topic: str, end: int) -> None:
    """Wait for an end offset: a transaction becomes visible a moment after its commit."""
    while cluster.watermarks(topic)[0][1] < end:
        pass


def test_lag_counts_work_and_reaches_zero(settings: Settings, cluster: Cluster) -> None:
    create_topics(cluster, settings)
    topics, prefix, codec = settings.kafka.topics, settings.kafka.topic_prefix, Codec()
    ready = topics.ready_batches_spec("default", "train")
    cluster.create_topic(ready.name, ready.partitions, ready.config)
    producer, admit = cluster.producer(), cluster.producer(f"{prefix}-admit")
    mark = records.StepMark(
        event_id="e", run_id="r", trajectory_key="k", step_id="s", mark="late", offset=0
    )
    for p in range(4):
        for _ in range(5):
            producer.put(topics.steps, None, codec.encode(records.Tick(partition=p)), partition=p)
            producer.put(
                topics.candidates,
                None,
                codec.encode(records.Tick(partition=p, event_time=1)),
                partition=p,
            )
    producer.put(topics.steps, b"k", b"poison")
    producer.put(topics.steps, b"k", None)
    producer.put(topics.trajectories, b"k", codec.encode(mark))
    mine, other = (
        b"default",
        next(
            b"r%d" % i
            for i in range(99)
            if partition_of(b"r%d" % i, 4) == partition_of(b"default", 4)
        ),
    )
    producer.put(topics.candidates, mine, codec.encode(ENDED))
    producer.put(topics.candidates, other, codec.encode(ENDED))
    producer.flush()
    with admit.transaction():
        admit.put(ready.name, b"default", codec.encode(ENDED))
    wait_for_end(cluster, ready.name, 2)

    rows = {
        (r.group.removeprefix(f"{prefix}-"), r.topic.removeprefix(f"{prefix}.")): r
        for r in lag(cluster, settings)
    }
    assert {k: (r.offsets, r.records) for k, r in rows.items() if r.offsets} == {
        ("assemble", "steps"): (22, 1),
        ("reward", "trajectories"): (1, 1),
        ("admit.default.train", "candidates"): (7, 1),
        ("admit.default.val", "candidates"): (7, 1),
        ("trainer.default.train", "ready-batches.default.train"): (2, 1),
        ("lake", "steps"): (22, 1),
        ("lake", "trajectories"): (1, 1),
        ("lake", "candidates"): (22, 2),
        ("lake", "schemas"): (len(TOP_LEVEL), len(TOP_LEVEL)),
        ("lake", "ready-batches.default.train"): (2, 1),
    }
    assert all(r.exact and r.committed is None for r in rows.values())
    assert all((r.waiting_s > 0) == (r.records > 0) for r in rows.values())
    assert rows["assemble", "rewards"].partitions == 4
    assert data_lag(cluster, settings, f"{prefix}-lake") == 5 + len(TOP_LEVEL)

    for topic in (topics.steps, topics.trajectories, topics.candidates, topics.schemas, ready.name):
        commit(cluster, f"{prefix}-lake", topic)
    commit(cluster, f"{prefix}-trainer.default.train", ready.name)
    commit(cluster, f"{prefix}-by-hand", topics.steps)
    assert (
        data_lag(cluster, settings, f"{prefix}-lake")
        == data_lag(cluster, settings, f"{prefix}-trainer.default.train")
        == 0
    )
    producer.put(topics.steps, None, codec.encode(records.Tick(partition=1)), partition=1)
    producer.flush()
    (by_hand,) = (r for r in lag(cluster, settings) if r.group == f"{prefix}-by-hand")
    assert (
        by_hand.partitions,
        by_hand.committed,
        by_hand.end,
        by_hand.offsets,
        by_hand.records,
    ) == (4, 22, 23, 1, 0)
    printed = format_lag([by_hand]).splitlines()
    assert printed[0].split() == [
        "GROUP",
        "TOPIC",
        "PARTITIONS",
        "COMMITTED",
        "END",
        "OFFSETS",
        "RECORDS",
        "SECONDS",
    ]
    row = [f"{prefix}-by-hand", topics.steps, "4", "22", "23", "1", "0", "0"]
    assert printed[1].split() == row


@pytest.mark.parametrize("scan_records", [10, 1_000])
def test_what_a_group_has_handled_beyond_its_position_is_not_left(
    settings: Settings, cluster: Cluster, scan_records: int
) -> None:
    """Of 20 records and a Tick all are handled, then a control record and another Tick come."""
    create_topics(cluster, settings)
    topic, group = settings.kafka.topics.weights, f"{settings.kafka.topic_prefix}-mine"
    tick = Codec().encode(records.Tick(partition=0))
    producer, other = cluster.producer(), cluster.producer(f"{group}-other")
    for _ in range(20):
        producer.put(topic, b"k", Codec().encode(ENDED))
    producer.flush()
    with other.transaction():
        other.put(topic, b"k", tick)
    wait_for_end(cluster, topic, 22)

    def left(handled: int) -> tuple[int, int]:
        reader = cluster.reader(group, {})
        while cluster.commits(group).get((topic, 0), Commit(0)).handled != handled:
            reader.commit({(topic, 0): 3}, CommitMetadata(handled=handled))
            reader.poll(1, 0.1)
        reader.close()
        (b,) = (
            b
            for b in backlogs(cluster, settings, scan_records)
            if (b.group, b.topic) == (group, topic)
        )
        return b.records, b.left

    held = 17 if scan_records > 20 else 18  # a short part is counted, a long one is its offsets
    assert left(21) == (held, 0)
    producer.put(topic, b"k", tick)
    producer.flush()
    assert left(21) == (held, 1)
    assert left(23) == (17 if scan_records > 20 else 20, 0)


def test_a_long_backlog_is_an_upper_bound_and_an_open_transaction_is_not_there_yet(
    settings: Settings, cluster: Cluster
) -> None:
    create_topics(cluster, settings)
    topics, prefix, codec = settings.kafka.topics, settings.kafka.topic_prefix, Codec()
    producer, admit = cluster.producer(), cluster.producer(f"{prefix}-open")
    for _ in range(11):
        producer.put(topics.weights, b"v", codec.encode(records.Tick(partition=0)))
    producer.flush()
    with admit.transaction():
        admit.put(topics.dead_letters, b"k", codec.encode(ENDED))
        admit.flush()
        rows = {
            r.topic: r
            for r in lag(cluster, settings, scan_records=10)
            if r.group == f"{prefix}-lake"
        }
    assert (rows[topics.weights].records, rows[topics.weights].exact) == (11, False)
    assert rows[topics.weights].waiting_s > 0
    assert (rows[topics.dead_letters].offsets, rows[topics.dead_letters].exact) == (0, True)
    assert "<=11" in format_lag(rows.values())
    wait_for_end(cluster, topics.dead_letters, 2)
    assert data_lag(cluster, settings, f"{prefix}-lake") == 1 + len(TOP_LEVEL)


class Busy(Cluster):
    """A cluster on which a group advances at the moment when its position is requested."""

    going_on: tuple[str, str] | None = None

    def commits(self, group: str) -> dict[tuple[str, int], Commit]:
        """Return the group's new position."""
        if self.going_on is not None and self.going_on[0] == group:
            topic = self.going_on[1]
            producer = self.producer()
            for p in self.watermarks(topic):
                producer.put(
                    topic,
                    None,
                    Codec().encode(records.Tick(partition=p, event_time=1)),
                    partition=p,
                )
            producer.flush()
            commit(Cluster(self.bootstrap_servers), group, topic)
        return super().commits(group)


def test_a_group_that_goes_on_while_lag_is_asked_is_not_behind_by_the_whole_log(
    settings: Settings,
) -> None:
    """Two groups read the candidates.

    The end offset fetched for the first group is below the second group's newer position.
    """
    cluster = Busy(settings.bootstrap_servers)
    create_topics(cluster, settings)
    topic, admit = settings.kafka.topics.candidates, f"{settings.kafka.topic_prefix}-admit.default."
    cluster.going_on = admit + "val", topic
    cluster.committed(admit + "val")
    commit(Cluster(settings.bootstrap_servers), admit + "train", topic)
    rows = {r.group: r for r in lag(cluster, settings) if r.topic == topic}
    assert rows[admit + "val"].committed is not None and rows[admit + "val"].offsets == 0
    assert (rows[admit + "train"].offsets, rows[admit + "train"].records) == (1, 0)

"""Several lake writers as processes on a real Kafka: killed, replaced, and changing in number."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.lake import Eventually, Writers, a_reward, a_step, column, put_steps, running

from clawstream.ops.lag import data_lag
from clawstream.ops.position_check import examine
from clawstream.runtime.exit_codes import EXIT_FENCED
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas import records
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.positions import positions

PARTITIONS = 12


@pytest.fixture
def wide(settings: Settings) -> Settings:
    kafka = settings.kafka.model_copy(update={"partitions": PARTITIONS})
    return settings.model_copy(update={"kafka": kafka})


@pytest.fixture
def processes(wide: Settings) -> Iterator[Writers]:
    with running(wide) as made:
        yield made


class Feed:
    """Write steps, some of them twice.

    Every ten steps come with a trajectory, a candidate, a reward, and an invalid record.
    """

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        create_topics(cluster, settings)
        self.settings, self.producer, self.rng = settings, cluster.producer(), random.Random(5)
        self.sent = 0

    def put(self, tens: int) -> None:
        codec, topics = Codec(), self.settings.kafka.topics
        for _ in range(tens):
            numbers = list(range(self.sent, self.sent + 10))
            again = [self.rng.randrange(max(0, self.sent - 300), self.sent + 10) for _ in range(2)]
            self.sent += 10
            put_steps(self.producer, self.settings, [*numbers, *again])
            key = f"k{self.sent}"
            trajectory = records.Trajectory(
                run_id="r", trajectory_key=key, trajectory_id=key, group_id="g", channel="train",
                outcome="completed", opened_at=1, closed_at=2, part=0, parts=1, segments=(),
                steps=(),
            )  # fmt: skip
            candidate = records.Candidate(
                run_id=key, channel="train", trajectory_key=key, trajectory_id=key, group_id="g",
                revision=0, outcome="completed", opened_at=1, closed_at=2, rewards=(), steps=(),
                prompt_tokens=1, trainable_tokens=1, trainable=True,
            )  # fmt: skip
            place = {"topic_id": b"T", "partition": b"0", "first_offset": b"0", "last_offset": b"0"}
            # A repeated output: same id, same key, new offset.
            for _ in range(self.rng.randint(1, 2)):
                self.producer.put(topics.trajectories, key.encode(), codec.encode(trajectory))
                self.producer.put(
                    topics.candidates, key.encode(), codec.encode(candidate), headers=place
                )
                self.producer.put(topics.rewards, key.encode(), codec.encode(a_reward(self.sent)))
            self.producer.put(topics.weights, key.encode(), b"rubbish")
        self.producer.flush()

    def check(self, eventually: Eventually) -> None:
        """Check that all sent records are there once."""
        tens = range(10, self.sent + 1, 10)
        wanted: dict[tuple[str, str], list[Any]] = {
            ("steps", "step_id"): [a_step(i).step_id for i in range(self.sent)],
            ("trajectories", "trajectory_id"): [f"k{n}" for n in tens],
            ("candidates", "trajectory_id"): [f"k{n}" for n in tens],
            ("rewards", "event_id"): [f"w{n}" for n in tens],
            ("dead_letters", "key"): [f"k{n}".encode() for n in tens],
        }
        for (table, name), values in wanted.items():
            eventually(lambda t=table, n=name, v=values: len(column(self.settings, t, n)) >= len(v))
        for (table, name), values in wanted.items():
            assert sorted(column(self.settings, table, name)) == sorted(values), table


def test_two_writers_killed_at_random_write_each_row_once(
    wide: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    feed, rng = Feed(cluster, wide), random.Random(3)

    def start(writer: int) -> subprocess.Popen[bytes]:
        rows = rng.choice([20, 100, 1000])
        return processes.write(
            writers=2, writer=writer, flush_interval_s=rng.uniform(0.02, 0.2), flush_rows=rows
        )

    writers = [start(0), start(1)]
    for _ in range(2):
        before = len(column(wide, "steps", "step_id"))
        for _ in range(6):
            feed.put(4)
            time.sleep(rng.random() * 0.05)
        eventually(lambda least=before: len(column(wide, "steps", "step_id")) > least)
        time.sleep(rng.random() * 0.3)
        victim = rng.randrange(2)
        writers[victim].kill()
        writers[victim].wait()
        feed.put(2)
        writers[victim] = start(victim)
    feed.check(eventually)
    # The last records are duplicates, and a commit to Kafka follows each flush.
    eventually(lambda: data_lag(cluster, wide, f"{wide.kafka.topic_prefix}-lake") == 0)
    assert [processes.stop(w) for w in writers] == [0, 0]
    feed.check(eventually)
    found = examine(cluster, positions(wide, cluster))
    assert {d.verdict for d in found} == {"ok"}
    read = {
        d.position.partition for d in found if d.position.topic == wide.kafka.topics.trajectories
    }
    assert read == set(range(PARTITIONS))


def test_a_second_process_of_one_number_and_another_number_of_writers_fence_those_of_before(
    wide: Settings, cluster: Cluster, processes: Writers, eventually: Eventually
) -> None:
    feed = Feed(cluster, wide)

    def start(writer: int, writers: int) -> subprocess.Popen[bytes]:
        return processes.write(writers=writers, writer=writer, flush_interval_s=0.05)

    def ends(process: subprocess.Popen[bytes]) -> bool:
        feed.put(2)  # a writer without new records does not notice
        time.sleep(0.2)
        return process.poll() is not None

    alone = start(0, 1)
    feed.put(10)
    eventually(lambda: column(wide, "steps", "step_id"))
    odd, even = start(1, 2), start(0, 2)
    eventually(lambda: ends(alone))
    former, odd = odd, start(1, 2)
    eventually(lambda: ends(former))
    assert (alone.returncode, former.returncode) == (EXIT_FENCED, EXIT_FENCED)
    feed.check(eventually)
    assert (even.poll(), odd.poll()) == (None, None)
    alone = start(0, 1)
    eventually(lambda: ends(even) and odd.poll() is not None)
    assert (even.returncode, odd.returncode) == (EXIT_FENCED, EXIT_FENCED)
    feed.check(eventually)
    assert processes.stop(alone) == 0
    feed.check(eventually)

"""Assemble on a real Kafka with real worker processes that are killed, paused and doubled."""

from __future__ import annotations

import itertools
import random
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Eventually, Jobs, reward, running, session, step
from support.processes import freeze

from clawstream.rewards.turns import new_messages
from clawstream.runtime.exit_codes import EXIT_FAILED, EXIT_SOURCE
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.records import (
    Candidate,
    DeadLetter,
    SessionEvent,
    Step,
    StepMark,
    Tick,
    Trajectory,
)
from clawstream.schemas.records.rewards import COMPLETION_NAME
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.assemble.payload.segment_tree import prompt_of


@pytest.fixture
def jobs(settings: Settings, cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    with running(settings, cluster, tmp_path) as made:
        yield made


def test_an_end_that_is_read_long_before_its_reward_has_it_in_revision_0(
    jobs: Jobs, eventually: Eventually
) -> None:
    jobs.start()
    *events, end = jobs.conversation("k")
    jobs.put(*events, replace(end, rewards={COMPLETION_NAME: 0.75}))
    eventually(lambda: "k" in jobs.candidates())
    own = {"source": "env", "name": COMPLETION_NAME}
    jobs.put(reward("k", 0.75, **own), reward("k", 0.25, **own | {"reward_revision": 1}))
    eventually(lambda: jobs.candidates()["k"].revision > 0)
    revisions = [c for _, c in jobs.records(jobs.topics.candidates, Candidate)]
    assert [[(r.name, r.value) for r in c.rewards] for c in revisions] == [
        [(COMPLETION_NAME, 0.75)],
        [(COMPLETION_NAME, 0.25)],
    ]


def test_join_places_and_ordered_stop(jobs: Jobs, eventually: Eventually) -> None:
    # On a slow machine the worker must not lose and regain its partitions, which repeats ticks.
    worker = jobs.start(session_timeout_s=60)
    keys = [f"k{i}" for i in range(12)]
    for key in keys:
        jobs.put(*jobs.conversation(key), reward(key, 0.5))
    jobs.producer.flush()
    eventually(lambda: len([c for c in jobs.candidates().values() if c.rewards]) == len(keys), 180)

    topic_id = jobs.cluster.topic_id(jobs.topics.trajectories)
    for record, c in jobs.records(jobs.topics.candidates, Candidate):
        assert record.key == b"run" and record.headers["topic_id"].decode() == topic_id
        place = [int(record.headers[n]) for n in ("partition", "first_offset", "last_offset")]
        assert place[0] == partition_of(c.trajectory_key.encode(), 4)
        (payload,) = (
            jobs.codec.decode(r.value)
            for r in jobs.cluster.read_range(jobs.topics.trajectories, *place)
        )
        assert (payload.trajectory_id, payload.group_id, payload.group_size) == (
            c.trajectory_id,
            "g-k",
            4,
        )
        assert (
            payload.metadata_json == b'{"gold":"x"}' and payload.outcome == c.outcome == "completed"
        )
        assert [s.drift for s in payload.steps] == ["root", "clean", "clean"]
        assert [len(prompt_of(payload.segments, s.segment)) // 4 for s in payload.steps] == [
            3,
            7,
            11,
        ]
        assert (c.trainable_tokens, c.prompt_tokens, c.oldest_sync_index) == (6, 7, 2)

    # Event time advances from every source partition to every partition of candidates, and lag
    # falls to the ticks only.
    def ticked() -> dict[tuple[int, int], list[int]]:
        ticks: dict[tuple[int, int], list[int]] = defaultdict(list)
        for record, t in jobs.records(jobs.topics.candidates, Tick):
            ticks[t.partition, record.partition].append(t.event_time)
        return ticks

    # Each partition sends its tick after its own outputs; the last one may be a second later.
    eventually(lambda: len(ticked()) == 16)
    assert all(times == sorted(set(times)) for times in ticked().values())
    jobs.put(reward(keys[0], 0.9, step_id=jobs.candidates()[keys[0]].steps[0].step_id))
    jobs.producer.flush()
    eventually(lambda: len(jobs.candidates()[keys[0]].rewards) == 2)
    group = f"{jobs.topics.prefix}-assemble"
    ends = {
        (t, p): e
        for t in (jobs.topics.steps, jobs.topics.rewards)
        for p, (_, e) in jobs.cluster.watermarks(t).items()
    }
    eventually(
        lambda: all(
            jobs.cluster.committed(group).get(place, -1) >= end for place, end in ends.items()
        )
    )

    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0
    count = len(jobs.records(jobs.topics.trajectories, Trajectory))
    jobs.start()  # a new owner repeats nothing
    jobs.put(*jobs.conversation("next"))
    jobs.producer.flush()
    eventually(lambda: "next" in jobs.candidates(), 180)
    assert len(jobs.records(jobs.topics.trajectories, Trajectory)) == count + 1


def test_bad_input_stragglers_and_unknown_targets(jobs: Jobs, eventually: Eventually) -> None:
    jobs.start(trajectory_timeout_s=1.5, orphan_after_s=1.0)
    topics = jobs.topics
    eventually(lambda: jobs.records(topics.candidates, Tick), 180)
    key = "straggler"
    other = f"{key}~{'0' * 26}.0"
    for topic in (topics.steps, topics.rewards):
        for value in (
            b"garbage",
            None,
            b"\xc3\x01unknown!body",
            jobs.codec.encode(Tick(partition=0))[:-1] + b"\xff\xff",
        ):
            jobs.producer.put(topic, key.encode(), value)
    jobs.producer.put(topics.steps, key.encode(), jobs.codec.encode(reward(key, 1.0)))
    jobs.producer.put(topics.rewards, key.encode(), jobs.codec.encode(step(key, [1], [2])))
    first = step(key, [1], [2])
    jobs.put(first, reward("nobody", 1.0), reward(key, 1.0, step_id=other), reward(key, 0.25))
    jobs.producer.flush()

    eventually(lambda: key in jobs.candidates() and jobs.candidates()[key].rewards)
    assert (jobs.candidates()[key].outcome, jobs.candidates()[key].rewards[0].value) == (
        "timed_out",
        0.25,
    )
    late = step(key, [1, 2, 3], [4])
    jobs.put(late, first)  # one late step and one duplicate
    jobs.producer.flush()
    eventually(lambda: jobs.records(topics.trajectories, StepMark))
    marks = [m for _, m in jobs.records(topics.trajectories, StepMark)]
    assert [(m.step_id, m.mark, m.trajectory_id) for m in marks] == [(late.step_id, "late", key)]
    eventually(lambda: len(jobs.records(topics.dead_letters, DeadLetter)) >= 12)
    letters = jobs.records(topics.dead_letters, DeadLetter)
    reasons = sorted((d.topic.rpartition(".")[2], d.reason) for _, d in letters)
    assert reasons == sorted(
        [
            (t, r)
            for t in ("steps", "rewards")
            for r in ["undecodable"] * 3 + ["unknown_schema", "invalid"]
        ]
        + [("rewards", "unknown_target")] * 2
    )
    for record, letter in letters:
        (original,) = jobs.cluster.read_range(
            letter.topic, letter.partition, letter.offset, letter.offset
        )
        assert (letter.key, letter.value, record.key) == (
            original.key,
            original.value,
            original.key,
        )
        assert letter.topic_id == jobs.cluster.topic_id(letter.topic)


class Feed(threading.Thread):
    """Write whole conversations at a steady rate with their records interleaved.

    Each conversation gets a reward, some of them before their steps.
    """

    def __init__(self, jobs: Jobs, count: int, rate: float) -> None:
        """Create a feed of at least `count` conversations.

        When a test sets `enough` to False at the start, the feed continues until `enough` is set.
        """
        super().__init__()
        self.jobs, self.keys, self.rate = jobs, [f"t{i}" for i in range(count)], rate
        self.enough = True

    def run(self) -> None:
        rng, open_ = random.Random(1), list[list[Any]]()
        waiting = list(self.keys)
        while waiting or open_:
            if not waiting and not self.enough:
                waiting.append(f"t{len(self.keys)}")
                self.keys.append(waiting[0])
            while waiting and len(open_) < 40:
                open_.append(self.jobs.conversation(waiting.pop(0)))
            at = rng.randrange(len(open_))
            event = open_[at].pop(0)
            self.jobs.put(event, *[event] * (rng.random() < 0.05))
            if event.__class__ is SessionEvent and event.kind == (
                "opened" if len(event.trajectory_key) % 2 else "completed"
            ):
                self.jobs.put(reward(event.trajectory_key, float(len(event.trajectory_key))))
            if not open_[at]:
                open_.pop(at)
            time.sleep(1 / self.rate)
        self.jobs.producer.flush()


def check_everything_once(jobs: Jobs, keys: list[str]) -> int:
    """Check that nothing is lost and that duplicates have the same bytes.

    Returns the number of records that are there twice.
    """
    last = jobs.candidates()
    assert sorted(last) == sorted(keys)
    for key, c in last.items():
        assert (c.outcome, len(c.steps), c.trainable_tokens) == ("completed", 3, 6)
        assert [r.value for r in c.rewards] == [float(len(key))]
    values: dict[tuple[str, str, int], list[bytes | None]] = defaultdict(list)
    for record, t in jobs.records(jobs.topics.trajectories, Trajectory):
        values["trajectory", t.trajectory_id, t.part].append(record.value)
    for record, c in jobs.records(jobs.topics.candidates, Candidate):
        values["candidate", c.trajectory_id, c.revision].append(record.value)
    assert {k[1] for k in values if k[0] == "trajectory"} == set(keys)
    different = [k for k, v in values.items() if len(set(v)) != 1]
    assert not different, f"sent again with other bytes: {different[:5]}"
    assert not jobs.records(jobs.topics.dead_letters, DeadLetter)
    return sum(len(v) - 1 for v in values.values())


def test_killed_over_and_over_loses_nothing(jobs: Jobs, eventually: Eventually) -> None:
    def written() -> int:
        return sum(end for _, end in jobs.cluster.watermarks(jobs.topics.assembly).values())

    feed = Feed(jobs, 100, 150)
    feed.enough = False  # the workers need input as long as they are killed
    feed.start()
    rng = random.Random(2)
    for _ in range(6):
        worker = jobs.start(snapshot_min_bytes=3000, new_messages_bytes=1000)
        before = written()
        eventually(lambda n=before: written() >= n + 10, 180)
        time.sleep(rng.uniform(0, 1.0))  # the kill hits a random point of a batch
        worker.kill()
        worker.wait()
    feed.enough = True
    jobs.start(snapshot_min_bytes=3000, new_messages_bytes=1000)
    feed.join()
    eventually(
        lambda: len([c for c in jobs.candidates().values() if c.rewards]) == len(feed.keys), 180
    )
    twice = check_everything_once(jobs, feed.keys)
    for _, trajectory in jobs.records(jobs.topics.trajectories, Trajectory):
        found = [message["content"] for s in trajectory.steps for message in new_messages(s)]
        assert found == ["0?", "1?", "2?"]  # also of steps that were read again
    # Records replaced by the last snapshot are deleted a moment after the outputs.
    eventually(
        lambda: all(low for low, _ in jobs.cluster.watermarks(jobs.topics.assembly).values())
    )
    print(f"{twice} records were sent again")


def test_second_worker_shares_and_a_stopped_one_is_fenced(
    jobs: Jobs, eventually: Eventually
) -> None:
    def owners() -> dict[int, str]:
        return {
            r.partition: marker.worker
            for r, marker in jobs.records(jobs.topics.assembly, object)
            if hasattr(marker, "worker")
        }

    feed = Feed(jobs, 150, 100)
    first = jobs.start("0")
    eventually(lambda: len(owners()) == 4, 180)
    feed.start()
    second = jobs.start("1")
    eventually(lambda: set(owners().values()) == {"0", "1"}, 180)
    freeze(first.pid)
    eventually(lambda: set(owners().values()) == {"1"}, 180)
    feed.join()
    eventually(
        lambda: len([c for c in jobs.candidates().values() if c.rewards]) == len(feed.keys), 180
    )
    first.send_signal(signal.SIGCONT)
    # A worker paused within a batch is fenced and exits. A worker paused between two batches finds
    # that it has left the group, and rejoins.
    jobs.put(*jobs.conversation("t-after"), reward("t-after", 7.0))
    jobs.producer.flush()
    eventually(lambda: "t-after" in jobs.candidates() and jobs.candidates()["t-after"].rewards, 180)
    assert first.poll() in (None, EXIT_FAILED)
    assert second.poll() is None
    check_everything_once(jobs, [*feed.keys, "t-after"])


def test_positions_are_of_one_topic(jobs: Jobs, eventually: Eventually) -> None:
    worker = jobs.start()
    jobs.put(*jobs.conversation("done"), step("open", [1], [2]))
    jobs.producer.flush()
    eventually(lambda: "done" in jobs.candidates(), 180)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0
    jobs.cluster.delete_topic(jobs.topics.steps)
    eventually(lambda: jobs.topics.steps not in jobs.cluster.topics())
    create_topics(jobs.cluster, jobs.settings)
    jobs.put(*jobs.conversation("fresh"))
    jobs.producer.flush()
    worker = jobs.start()
    eventually(lambda: {"open", "fresh"} <= jobs.candidates().keys(), 180)
    assert (jobs.candidates()["open"].outcome, jobs.candidates()["fresh"].outcome) == (
        "lost",
        "completed",
    )
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0

    jobs.put(step("gone", [1], [2]))  # folded, then removed by retention before it closes
    jobs.producer.flush()
    worker = jobs.start()
    place = (jobs.topics.steps, partition_of(b"gone", 4))
    end = max(r.offset for r, _ in jobs.records(jobs.topics.steps, Step) if r.key == b"gone") + 1
    group = f"{jobs.topics.prefix}-assemble"
    eventually(lambda: jobs.cluster.committed(group).get(place, 0) >= end, 180)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0
    jobs.cluster.delete_records(place[0], place[1], end)
    worker = jobs.start()
    jobs.put(session("gone", "completed"), reward("gone", 1.0))
    jobs.producer.flush()
    eventually(lambda: "gone" in jobs.candidates() and jobs.candidates()["gone"].rewards, 180)
    assert (jobs.candidates()["gone"].outcome, jobs.candidates()["gone"].trainable) == (
        "lost",
        False,
    )
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0

    jobs.put(*[step("open2", [1], [2]) for _ in range(5)])
    jobs.producer.flush()
    p = partition_of(b"open2", 4)
    jobs.cluster.delete_records(
        jobs.topics.steps, p, jobs.cluster.watermarks(jobs.topics.steps)[p][1]
    )
    assert jobs.start().wait(180) == EXIT_SOURCE
    assert "source truncated" in jobs.processes.log("assemble-0")


def test_retention_that_overtakes_a_running_worker_is_an_error(
    jobs: Jobs, eventually: Eventually
) -> None:
    """The consumer silently continues at the log's start; the fold must not skip lost records."""
    topic, partition = jobs.topics.steps, 0
    keys = (k for n in itertools.count() if partition_of((k := f"t{n}").encode(), 4) == partition)
    worker = jobs.start(session_timeout_s=60)  # it stays the owner while it is paused

    def put(*events: Any) -> int:
        """Write events and return the end offset of the partition."""
        jobs.put(*events)
        jobs.producer.flush()
        return jobs.cluster.watermarks(topic, [partition])[partition][1]

    def overtaken() -> bool:
        """Return whether the worker died because of the lost records.

        It survives when a fetch in flight has already returned the deleted records.
        """
        before, gone, behind = itertools.islice(keys, 3)
        put(*jobs.conversation(before))
        eventually(lambda: before in jobs.candidates())
        freeze(worker.pid)
        put(step(before, [1], [2]))  # a record for such a fetch
        jobs.cluster.delete_records(topic, partition, put(*jobs.conversation(gone)))
        put(*jobs.conversation(behind))
        worker.send_signal(signal.SIGCONT)
        eventually(lambda: worker.poll() is not None or behind in jobs.candidates())
        known = jobs.candidates()
        assert gone in known or behind not in known, "it went on behind the hole"
        return worker.poll() is not None

    assert any(overtaken() for _ in range(3))
    assert worker.wait() == EXIT_SOURCE
    low = jobs.cluster.watermarks(topic, [partition])[partition][0]
    assert f"source truncated: {topic}-{partition} begins at offset {low}; " in jobs.processes.log(
        "assemble-0"
    )
    assert jobs.start().wait(180) == EXIT_SOURCE  # its state has nothing after the gap either
    told = re.findall(
        rf"{topic}-{partition} holds offsets {low} to \d+, position (\d+)",
        jobs.processes.log("assemble-0"),
    )
    assert told and int(told[0]) < low


def test_state_log_made_anew_under_a_running_worker(jobs: Jobs, eventually: Eventually) -> None:
    """The worker must not continue with a changelog that a later owner could not read.

    The worker exits at its first record in the recreated topic, and the next worker starts from the
    beginning.
    """
    worker = jobs.start()
    first = [f"a{i}" for i in range(12)]
    for key in first:
        jobs.put(*jobs.conversation(key), reward(key, 0.5))
    jobs.producer.flush()
    eventually(lambda: len([c for c in jobs.candidates().values() if c.rewards]) == len(first), 180)
    jobs.cluster.delete_topic(jobs.topics.assembly)
    eventually(lambda: jobs.topics.assembly not in jobs.cluster.topics())
    create_topics(jobs.cluster, jobs.settings)
    for key in ("b0", "b1", "b2", "b3"):
        jobs.put(*jobs.conversation(key))
    jobs.producer.flush()
    assert worker.wait(180) == 1
    assert "the topic was recreated" in jobs.processes.log("assemble-0")

    worker = jobs.start()
    eventually(lambda: {"b0", "b1", "b2", "b3"} <= jobs.candidates().keys(), 180)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0
    count = len(jobs.records(jobs.topics.trajectories, Trajectory))
    jobs.start()  # its state is on the log again: nothing is done a third time
    jobs.put(*jobs.conversation("c"))
    jobs.producer.flush()
    eventually(lambda: "c" in jobs.candidates(), 180)
    assert len(jobs.records(jobs.topics.trajectories, Trajectory)) == count + 1

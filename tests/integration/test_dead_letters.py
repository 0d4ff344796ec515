"""Dead letters on a real Kafka with a real assemble worker.

They are listed and replayed once each, whichever process is killed.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Eventually, Jobs, reward, running, session, step
from support.lake import column
from support.up import ENVIRON, ROOT, command
from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.ops.dead_letters.redrive import Redriver
from clawstream.runtime.kafka import Cluster, Fenced
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import dead_letter
from clawstream.schemas.codec.single_object import MAGIC, Codec, shipped
from clawstream.schemas.records import (
    DeadLetter,
    DeadLetterResolved,
    Reward,
    SchemaPublished,
    Step,
    StepMark,
    Trajectory,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import REPLAYS

TRAJECTORY = "late-comer"


@pytest.fixture
def jobs(settings: Settings, cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    with running(settings, cluster, tmp_path, orphan_after_s=1.0) as made:
        yield made


class Dlq:
    """Run `clawstream dlq` on an installation."""

    def __init__(self, jobs: Jobs) -> None:
        self._words, self._jobs = overrides_of(jobs.settings), jobs

    def __call__(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["dlq", *words, *self._words])
        assert done.exit_code == code, (done.output, done.exception)
        return done.output

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--format", "json"))

    def ids(self, *words: str) -> list[str]:
        return [x["id"] for x in self.json("list", *words)]

    def resolved(self) -> list[DeadLetterResolved]:
        return [
            r for _, r in self._jobs.records(self._jobs.topics.dead_letters, DeadLetterResolved)
        ]


def newer(step: Step) -> tuple[bytes, SchemaPublished]:
    """Return the step as a newer release writes it, and the schema that makes it readable.

    This release cannot read the step without the schema.
    """
    schema = shipped("Step") | {
        "fields": [*shipped("Step")["fields"], {"name": "added", "type": "string", "default": ""}]
    }
    text = json.dumps(schema)
    fingerprint = Codec().announce(text)
    value = MAGIC + bytes.fromhex(fingerprint) + Codec().encode(step)[10:] + b"\x06new"
    return value, SchemaPublished(
        fingerprint=fingerprint, name="clawstream.Step", schema_json=text, created_at=0
    )


def test_what_was_wrong_is_mended_and_everything_counts_once(
    jobs: Jobs, eventually: Eventually
) -> None:
    dlq, topics, key = Dlq(jobs), jobs.topics, TRAJECTORY
    jobs.start()
    words = ("lake.dedupe_window=1", "lake.flush_interval_s=0.3")
    jobs.processes.start("lake", command("lake", *overrides_of(jobs.settings), *words), env=ENVIRON)
    misplaced, unknown = step(key, [1, 2], [3]), step(key, [1, 2, 3], [4])
    value, schema = newer(unknown)
    jobs.put(session(key, "opened"))
    jobs.put(misplaced, key=b"wrong")
    jobs.producer.put(topics.steps, key.encode(), value)
    jobs.producer.put(topics.steps, key.encode(), b"garbage")
    jobs.put(reward("nobody", 0.5), reward(key, float("nan")))
    jobs.producer.flush()
    eventually(lambda: len(dlq.ids()) == 5)

    listed = {x["reason"]: x for x in dlq.json("list") if x["reason"] != "invalid"}
    assert set(listed) == {"undecodable", "unknown_schema", "unknown_target"}
    nan, wrong = (
        dlq.json("list", "--reason", "invalid", "--topic", t)[0] for t in ("rewards", "steps")
    )
    assert (wrong["record"], wrong["run"], wrong["key"], wrong["bytes"]) == (
        "Step", "run", "wrong", len(jobs.codec.encode(misplaced)),
    )  # fmt: skip
    assert dlq.ids("--run", "run", "--topic", topics.rewards) == [
        x["id"] for x in dlq.json("list") if x["topic"] == topics.rewards
    ]
    assert "5 open: 2 invalid, 1 " in dlq("list")

    # A record with a wrong key is sent with its own key into an open trajectory.
    dlq("replay", wrong["id"], "--note", "the old feeder")
    # A newer release's record is readable after its schema is announced.
    assert "still no schema" in dlq("replay", "--reason", "unknown_schema", "--yes", code=1)
    jobs.codec.announce(schema.schema_json)
    jobs.producer.put(topics.schemas, schema.fingerprint.encode(), jobs.codec.encode(schema))
    jobs.producer.flush()
    assert (
        dlq.json("show", listed["unknown_schema"]["id"])["record_json"]["step_id"]
        == unknown.step_id
    )
    dlq("replay", listed["unknown_schema"]["id"])
    assert "nan is not in [-1e+06" in dlq("replay", nan["id"], code=1)
    assert dlq.json("show", nan["id"])["record_json"]["value"] == "NaN"
    dlq("dismiss", nan["id"], "--note", "sent again by hand")
    jobs.put(reward(key, 0.75), session(key, "completed"))
    jobs.producer.flush()
    eventually(lambda: key in jobs.candidates() and jobs.candidates()[key].rewards)
    candidate = jobs.candidates()[key]
    assert sorted(s.step_id for s in candidate.steps) == sorted(
        [misplaced.step_id, unknown.step_id]
    )
    assert [r.value for r in candidate.rewards] == [0.75]

    # A reward whose trajectory exists by now.
    jobs.put(*jobs.conversation("nobody"))
    jobs.producer.flush()
    eventually(lambda: "nobody" in jobs.candidates())
    assert not jobs.candidates()["nobody"].rewards
    dlq("replay", listed["unknown_target"]["id"])
    eventually(lambda: [r.value for r in jobs.candidates()["nobody"].rewards] == [0.5])
    # Garbage cannot be sent, and nothing is done twice unless the user forces it.
    assert "still 7 bytes that begin" in dlq("replay", "--all", "--yes", code=1)
    assert "it was replayed to" in dlq("replay", listed["unknown_target"]["id"], code=1)
    dlq("dismiss", "--topic", "steps", "--note", "a test")
    assert dlq.ids() == []
    dlq("replay", listed["unknown_target"]["id"], "--force")

    # a transaction becomes visible a moment after its commit
    eventually(lambda: len(dlq.resolved()) >= 6)
    done = dlq.resolved()
    assert Counter(r.action for r in done) == {"replayed": 4, "dismissed": 2}
    notes = {"the old feeder", "sent again by hand", "a test"}
    assert {r.note for r in done if r.note} == notes and all("@" in r.by for r in done)
    for r in done:
        if r.sent_offset is not None and r.sent_partition is not None:
            (sent,) = jobs.cluster.read_range(
                r.topic, r.sent_partition, r.sent_offset, r.sent_offset
            )
            assert (
                sent.headers[REPLAYS].decode() == f"{r.topic}-{r.partition}-{r.offset}@{r.topic_id}"
            )
            assert r.sent_topic_id == jobs.cluster.topic_id(r.topic)
            assert sent.key == jobs.codec.decode(sent.value).trajectory_key.encode()

    # A step for a closed trajectory is marked late once; a duplicate changes nothing.
    assert "nobody" in jobs.candidates() and not jobs.records(topics.trajectories, StepMark)
    late = step("nobody", [9], [9])
    jobs.put(late, key=b"elsewhere")
    jobs.producer.flush()
    eventually(lambda: len(dlq.ids()) == 1)
    (name,) = dlq.ids()
    dlq("replay", name)
    dlq("replay", name, "--force")
    jobs.put(*jobs.conversation("end"))
    jobs.producer.flush()
    eventually(lambda: "end" in jobs.candidates())
    eventually(lambda: len(jobs.records(topics.trajectories, StepMark)) == 1)
    assert [m.step_id for _, m in jobs.records(topics.trajectories, StepMark)] == [late.step_id]
    assert len(jobs.records(topics.trajectories, Trajectory)) == 3
    assert len(jobs.candidates()["nobody"].rewards) == 1
    for table, name, ids in (
        ("steps", "step_id", {misplaced.step_id, unknown.step_id, late.step_id}),
        ("rewards", "event_id", {e.event_id for _, e in jobs.records(topics.rewards, Reward)}),
        ("dead_letters_resolved", "action", {"replayed", "dismissed"}),
    ):
        eventually(lambda t=table, n=name, i=ids: i <= set(column(jobs.settings, t, n)))
        if table != "dead_letters_resolved":
            assert Counter(column(jobs.settings, table, name)).most_common(1)[0][1] == 1, (
                "each once in the lake"
            )


def test_a_step_that_is_too_large_is_shown(jobs: Jobs, eventually: Eventually) -> None:
    """The step does not fit into its dead letter, so it is read at its source position.

    The partition continues meanwhile.
    """
    dlq, key = Dlq(jobs), "large"
    jobs.start()
    giant = dataclasses.replace(
        step(key, [1], [2]), response_json=b'{"content":"' + b"x" * (10 * 2**20 - 40_000) + b'"}'
    )
    jobs.put(session(key, "opened"), giant, step(key, [1, 2, 3], [4]))
    jobs.producer.flush()
    eventually(dlq.ids)
    (entry,) = dlq.json("list")
    assert (entry["reason"], entry["bytes"], entry["record"]) == ("invalid", None, None)
    shown = dlq.json("show", entry["id"])
    assert (
        shown["record_json"]["step_id"] == giant.step_id
        and "tokens, reply and tags have more than" in shown["detail"]
    )
    assert "have more than" in dlq("replay", entry["id"], code=1)
    jobs.put(session(key, "completed"))
    jobs.producer.flush()
    eventually(lambda: key in jobs.candidates())
    assert {s.step_id for s in jobs.candidates()[key].steps}.isdisjoint({giant.step_id})


def test_a_transaction_that_is_given_up_is_not_folded(jobs: Jobs, eventually: Eventually) -> None:
    jobs.start()
    seen, never = step("k", [1], [2]), step("k", [1, 2], [3])
    jobs.put(session("k", "opened"), seen)
    jobs.producer.flush()
    killed = jobs.cluster.producer(
        f"{jobs.topics.prefix}-dead-letters", transaction_timeout_ms=10_000
    )
    with pytest.raises(KeyboardInterrupt), killed.transaction():
        killed.put(jobs.topics.steps, b"k", jobs.codec.encode(never))
        killed.flush()
        raise KeyboardInterrupt
    with Redriver(jobs.settings), pytest.raises(Fenced), killed.transaction():
        killed.put(jobs.topics.steps, b"k", jobs.codec.encode(never))
        killed.flush()
    jobs.put(session("k", "completed"))
    jobs.producer.flush()
    eventually(lambda: "k" in jobs.candidates())
    assert [s.step_id for s in jobs.candidates()["k"].steps] == [seen.step_id]


def write_dead_letters(jobs: Jobs, rewards: list[Reward], times: int = 1) -> None:
    """Write dead letters of rewards as assemble does, some more than once, as after a crash."""
    producer, topic_id = jobs.producer, jobs.cluster.topic_id(jobs.topics.rewards)
    jobs.put(*rewards)
    producer.flush()
    for record, _ in jobs.records(jobs.topics.rewards, Reward):
        entry = dead_letter(
            record, topic_id, "assemble", "unknown_target", "no trajectory in time\nmore"
        )
        for n in range(times if record.offset % 3 == 0 else 1):
            again = dataclasses.replace(entry, created_at=entry.created_at + n)
            producer.put(jobs.topics.dead_letters, entry.key, jobs.codec.encode(again))
    producer.flush()


@pytest.mark.long
def test_killed_in_the_middle_and_run_again_each_is_sent_once(jobs: Jobs) -> None:
    count, rng, dlq = 1500, random.Random(5), Dlq(jobs)
    rewards = [reward(f"k{i % 50}", float(i)) for i in range(count)]
    write_dead_letters(jobs, rewards, times=2)
    assert len(jobs.records(jobs.topics.dead_letters, DeadLetter)) > count == len(dlq.ids())
    assert dlq("replay", "--all", code=1).splitlines() == [
        f"{count} open: {count} unknown_target",
        f"clawstream: these are {count}: --yes does it",
    ]
    words = command("dlq", "replay", "--all", "--yes", *overrides_of(jobs.settings))
    kills = 0
    while len(dlq.resolved()) < count:
        with subprocess.Popen(
            words, cwd=ROOT, env=ENVIRON, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            if kills < 3:
                process.stdout.readline()  # the first transaction is committed
                time.sleep(rng.uniform(0, 0.1))
                process.kill()
                kills += process.wait() == -9
            else:
                assert process.stdout.readlines()[-1].endswith(" done, 0 left\n")
    assert kills and dlq.ids() == []
    sent = [e for r, e in jobs.records(jobs.topics.rewards, Reward) if REPLAYS in r.headers]
    assert sorted(e.event_id for e in sent) == sorted(r.event_id for r in rewards)
    assert Counter(Counter(e.event_id for e in sent).values()) == {1: count}
    where = {(r.sent_partition, r.sent_offset) for r in dlq.resolved()}
    assert where == {
        (r.partition, r.offset)
        for r, _ in jobs.records(jobs.topics.rewards, Reward)
        if REPLAYS in r.headers
    }


def test_wrong_words(jobs: Jobs) -> None:
    dlq = Dlq(jobs)
    assert dlq.json("list") == [] and dlq("list").splitlines()[-1] == "0 open"
    assert "no dead letter x: " in dlq("show", "x", code=1)
    assert "name dead letters by id" in dlq("replay", code=2)
    assert "name dead letters by id" in dlq("dismiss", "x", "--all", code=2)

"""`clawstream topics trim` on a real Kafka.

It deletes the records that no run needs, and every process starts and continues as before.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.admit import cand, policy
from support.feed import POLICY, Feed, reward
from support.jobs import Eventually, Jobs, running
from support.lake import running as lake_running
from support.up import call

from clawstream.ops import job_positions
from clawstream.ops.position_check import SERIOUS, Diagnosis, examine
from clawstream.ops.replay.verify import check
from clawstream.ops.topics.trim import TopicTrim, TrimInputs, TrimRange
from clawstream.runtime.kafka import Cluster, KafkaError, SourceTruncated
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import Decoder, create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import Version
from clawstream.schemas.records import Candidate, PolicyApplied, RunEnded, Tick, WeightVersion
from clawstream.schemas.settings import AdmitSettings, Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.admit.admitter import ChannelAdmitter
from clawstream.stream_jobs.admit.decisions.journal import CandidateLog, InputRecord
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.admit.main import publish_policy
from clawstream.stream_jobs.admit.policy_log import PolicyLog
from clawstream.stream_jobs.errors import UnreadableJournal
from clawstream.stream_jobs.lake import positions
from clawstream.stream_jobs.lake.main import Lake
from clawstream.stream_jobs.worker.payload import payload_place
from clawstream.trainer import positions as trainer_positions
from clawstream.trainer.position import Position
from clawstream.trainer.versions.directory import VersionState, new_directory

CODEC = Codec()
PARTITION = partition_of(b"old", 4)
OLD = "old"
ALIVE, NEXT = [r for i in range(99) if partition_of((r := f"alive-{i}").encode(), 4) == PARTITION][
    :2
]


class Stand(NamedTuple):
    """The position of a trainer's checkpoint on a journal."""

    topic_id: str
    next_offset: int


class Installation:
    """Two runs on one partition of the candidates: one that ends, one that continues."""

    def __init__(
        self, settings: Settings, cluster: Cluster, jobs: Jobs, eventually: Eventually
    ) -> None:
        self.settings, self.cluster, self.jobs, self.eventually = (
            settings,
            cluster,
            jobs,
            eventually,
        )
        self.topics = settings.kafka.topics
        self.feeds = {run: Feed(self.of(run)) for run in (OLD, ALIVE)}

    def of(self, run: str) -> Settings:
        admit = AdmitSettings.model_validate({"channels": ["train"], "policy": POLICY})
        return self.settings.model_copy(update={"run_id": run, "admit": admit})

    def admitter(self, run: str) -> ChannelAdmitter:
        """Start admission of a run, as the process does."""
        mine = self.of(run)
        create_topics(self.cluster, mine, [self.topics.ready_batches_spec(run, "train")])
        decoder = Decoder(self.cluster, self.topics.schemas)
        admitter = ChannelAdmitter(mine, "train", self.cluster, decoder)
        publish_policy(mine, self.cluster, decoder, admitter)
        admitter.open()
        return admitter

    def admit(self, run: str) -> None:
        """Run an admission that reads all current records, then ends."""
        admitter = self.admitter(run)
        end = admitter.end
        while admitter.position < end:
            admitter.step(0.1)
        admitter.close()
        for _ in self.cluster.read_all(self.journal(run), await_open=True):
            pass  # a transaction becomes visible a moment after its commit

    def candidates(self) -> list[InputRecord]:
        """Return all records of the runs' partition, which any admission reads.

        Sleeps a moment first, because polling callers should leave the jobs some time.
        """
        time.sleep(0.2)
        found = []
        for record in self.cluster.read_all(self.topics.candidates, PARTITION):
            event = CODEC.decode(record.value)
            place = payload_place(record.headers) if isinstance(event, Candidate) else None
            found.append(InputRecord(record.offset, event, place))
        return found

    def wait_for_candidates(self, *keys: str) -> None:
        """Wait for the last revisions of these trajectories with their rewards.

        Every partition must also have a tick after them.
        """

        def there() -> bool:
            entries = self.candidates()
            rewarded = {
                e.event.trajectory_id: e.offset
                for e in entries
                if isinstance(e.event, Candidate) and e.event.rewards
            }
            return rewarded.keys() >= {*keys} and self.ticked(max(rewarded[k] for k in keys))

        self.eventually(there)

    def ticked(self, offset: int) -> bool:
        """Return whether every partition has a tick after an offset of the candidates."""
        return {
            e.event.partition
            for e in self.candidates()
            if isinstance(e.event, Tick) and e.offset > offset
        } == {
            0,
            1,
            2,
            3,
        }

    def lows(self, *topics: str) -> dict[tuple[str, int], int]:
        """Return the start offsets of partitions.

        topics: by default all except the changelog, which trims itself.
        """
        mine = topics or [
            t for t in self.cluster.topics() if t.startswith(f"{self.topics.prefix}.")
        ]
        return {
            (t, p): low
            for t in mine
            if t != self.topics.assembly
            for p, (low, _) in self.cluster.watermarks(t).items()
        }

    def ends(self) -> dict[tuple[str, int], int]:
        """Return the end offsets of the partitions that the lake reads."""
        kept = (
            self.topics.steps,
            self.topics.rewards,
            self.topics.candidates,
            *map(self.journal, self.feeds),
        )
        return {(t, p): end for t in kept for p, (_, end) in self.cluster.watermarks(t).items()}

    def journal(self, run: str) -> str:
        return self.topics.ready_batches(run, "train")

    def applied(self) -> dict[tuple[str, int], int]:
        """Return the next offsets of assemble by its changelog.

        Its committed offsets are ahead of them while only ticks come.
        """
        found = job_positions.positions(self.settings, self.cluster)
        return {(p.topic, p.partition): p.offset for p in found if p.process == "assemble"}

    def trim(self, before_ms: int | None = None) -> dict[tuple[str, int], TrimRange]:
        """Trim as the command does with --yes."""
        applied = job_positions.rewards_applied(self.settings, self.cluster)
        kept = TrimInputs(
            positions.offsets_in_lake(self.settings, self.cluster), applied, before_ms
        )
        plan = TopicTrim(self.cluster, self.settings, kept)
        plan.do()
        return {(c.topic, c.partition): c for c in plan.ranges}

    def lake_catches_up(self) -> None:
        """Run a lake writer that takes all current records, then ends."""
        ends, group = self.ends(), f"{self.topics.prefix}-lake"
        with lake_running(self.settings) as lake:
            writer = lake.write()

            def all_read() -> bool:
                read = self.cluster.committed(group)
                return all(read.get(at, 0) >= end for at, end in ends.items())

            self.eventually(all_read)
            assert lake.stop(writer) == 0

    def unsound_positions(self) -> list[Diagnosis]:
        """Return the problems that `status --positions` finds."""
        modules = (positions, job_positions, trainer_positions)
        found = [p for m in modules for p in m.positions(self.settings, self.cluster)]
        assert {p.process for p in found} == {"lake", "assemble", "admit", "trainer"}
        return [d for d in examine(self.cluster, found) if d.verdict in SERIOUS]

    def trained(self, run: str, last: int) -> Stand:
        """Write the results of a trainer that has trained and published all batches up to `last`.

        Returns its checkpoint's position.
        """
        journal, weights = self.topics.ready_batches(run, "train"), self.topics.weights
        behind = next(
            r.offset + 1
            for r in self.cluster.read_all(journal)
            if getattr(CODEC.decode(r.value), "batch_seq", None) == last
        )
        at = Stand(self.cluster.topic_id(journal), behind)
        state = VersionState(
            version=Version(run, last + 1, 0), parent_version=None,
            weights_topic_id=self.cluster.topic_id(weights),
            position=Position(
                topic_id=at.topic_id, next_offset=behind, next_batch_seq=last + 1
            ),
        )  # fmt: skip
        with new_directory(self.settings.checkpoint_dir, state):
            pass
        version = WeightVersion(
            version_id=f"{run}/{last + 1}.0", run_id=run, sync_index=last + 1, attempt=0,
            format="full", files=(), channel="train", batches_topic_id=at.topic_id,
            first_batch_seq=0, last_batch_seq=last, metrics={}, created_at=0,
        )  # fmt: skip
        feed = self.feeds[run]
        feed.producer.put(weights, version.version_id.encode(), CODEC.encode(version))
        feed.producer.flush()
        return at


@pytest.fixture
def installation(
    settings: Settings, cluster: Cluster, tmp_path: Path, eventually: Eventually
) -> Iterator[Installation]:
    with running(settings, cluster, tmp_path) as jobs:
        made = Installation(settings, cluster, jobs, eventually)
        yield made
        for feed in made.feeds.values():
            feed.close()


def decided_at_once(entries: list[InputRecord], topic_id: str) -> list[str]:
    """Return the content hashes of the living run's batches by one fold over the whole log."""
    fold = AdmissionFold(ALIVE, "train", CandidateLog(topic_id, PARTITION, 4))
    return [d.content_hash for e in entries for d in fold.fold(e) if hasattr(d, "content_hash")]


def test_what_no_run_needs_goes_and_all_goes_on(installation: Installation) -> None:
    i = installation
    topics, cluster, old, alive = i.topics, i.cluster, i.feeds[OLD], i.feeds[ALIVE]
    candidates, journal = (topics.candidates, PARTITION), (i.journal(OLD), 0)
    worker = i.jobs.start()
    old.group("o1")
    old.group("o2")
    i.wait_for_candidates("o1-0", "o1-1", "o2-0", "o2-1")
    i.admit(OLD)
    ended = PolicyLog(i.of(OLD), cluster).end(None)
    i.eventually(lambda: i.ticked(ended))
    alive.group("a1")
    i.wait_for_candidates("a1-0", "a1-1")
    i.admit(ALIVE)
    assert len(old.batches()) == 2 and len(alive.batches()) == 1

    # the trim deletes nothing that the lake lacks, or that an admission or a trainer still needs
    here = i.lows()
    assert set(here.values()) == {0}
    held = i.trim(int(time.time() * 1000))
    assert (
        "the lake has it up to 0" in held[candidates].why
        and "the lake has it up to 0" in held[topics.rewards, 0].why
    )
    assert (
        f"has ended at {ended}, but the admission of old (train) has read to" in held[journal].why
    )
    i.admit(OLD)
    held = i.trim()
    assert (
        "2 batches of run old are not trained (--give-up old); the lake has it up to 0"
        in held[journal].why
    )
    position = i.trained(OLD, 1)
    assert i.trim()[journal].why == "the lake has it up to 0"
    assert i.lows() == here, "nothing was removed"

    # the lake has it: the old run's records are deleted, and no record of the other run
    before = int(time.time() * 1000)
    # below the lake's later positions, even if the jobs read a tick much later
    applied = i.applied()
    i.lake_catches_up()
    log = i.candidates()
    first = min(e.offset for e in log if getattr(e.event, "run_id", None) == ALIVE)
    ticks = {
        e.event.partition: e.offset for e in log if isinstance(e.event, Tick) and e.offset < first
    }
    done = i.trim(before)
    assert (
        ended < min(ticks.values()) == done[candidates].to == i.lows(topics.candidates)[candidates]
    )
    assert (
        done[candidates].why
        == f"run {ALIVE} lives, since offset {first}; the Ticks before {first} tell the time there"
    )
    assert done[journal].to == position.next_offset == i.lows(i.journal(OLD))[journal]
    assert not done[i.journal(ALIVE), 0].removes
    kept = [c for c in done.values() if c.topic == topics.rewards]
    assert not any(c.removes for c in kept) and all(
        f"{topics.steps} has steps since then" in c.why for c in kept
    )
    for p in range(4):  # retention deletes the processed steps
        cluster.delete_records(topics.steps, p, applied.get((topics.steps, p), 0))
    done = i.trim(before)
    assert not any(c.removes for c in done.values() if c.topic == topics.rewards), (
        "they came minutes ago: steps may wait for them"
    )
    for (topic, p), offset in applied.items():  # as a later trim would
        if topic == topics.rewards:
            cluster.delete_records(topic, p, offset)
    assert any(i.lows(topics.rewards).values())
    assert i.unsound_positions() == []

    # every process starts and continues as if no record were deleted
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(180) == 0
    i.jobs.start("1")
    alive.group("a2")
    old.put(dataclasses.replace(reward(OLD, "o1-0", 5.0), name="late"))
    i.wait_for_candidates("a2-0", "a2-1")
    i.eventually(lambda: any(getattr(e.event, "run_id", None) == OLD for e in i.candidates()))
    i.admit(ALIVE)
    i.admit(NEXT)
    whole = [*log, *(e for e in i.candidates() if e.offset > log[-1].offset)]
    assert alive.groups() == ["a1", "a2"]
    assert [b.content_hash for b in alive.batches()] == decided_at_once(
        whole, cluster.topic_id(topics.candidates)
    )
    assert check(i.of(ALIVE), "train")["first_difference"] is None
    for refused in (lambda: i.admitter(OLD), lambda: check(i.of(OLD), "train")):
        with pytest.raises(UnreadableJournal, match="take another run_id"):
            refused()
    assert cluster.check_position(journal[0], position.topic_id, 0, position.next_offset), (
        "its trainer can start"
    )
    with pytest.raises(SourceTruncated, match="run clawstream status --positions"):
        cluster.check_position(journal[0], position.topic_id, 0, position.next_offset - 1)
    i.lake_catches_up()
    assert set(alive.column("candidates", "run_id")) == {OLD, ALIVE}
    assert i.unsound_positions() == []
    done = i.trim()
    assert not done[candidates].removes and "old" not in done[candidates].why, (
        "what comes of it late holds nothing"
    )


def test_the_command_shows_a_plan_and_gives_up_by_name(
    settings: Settings, cluster: Cluster
) -> None:
    create_topics(cluster, settings)
    topics, producer, lake = (
        settings.kafka.topics,
        cluster.producer(),
        Lake(settings.lake_uri, {}, 10),
    )
    events = [
        (b"quiet", cand("x", run_id="quiet")),
        (b"alive", policy(run_id="alive")),
        (None, Tick(partition=0, event_time=1)),
    ]
    for key, event in events:
        producer.put(topics.candidates, key, CODEC.encode(event), partition=1)
    producer.flush()
    producer.close()
    lake.acquire()
    for table in ("candidates", "run_events"):
        lake.append(
            table,
            [],
            {(cluster.topic_id(topics.candidates), 1): 3},
            lambda *_: None,
            commit_offsets=True,
        )

    done = call("topics", "trim", *overrides_of(settings), timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split(maxsplit=5) == [
        *(topics.candidates, "1", "0", "-", "3"),
        "run quiet has no policy yet (--give-up quiet), since offset 0",
    ]  # fmt: skip
    assert done.stdout.endswith("\n\nnothing can be deleted\n")
    done = call(
        "topics", "trim", "--yes", "--give-up", "alive", *overrides_of(settings), timeout_s=240
    )
    assert (
        done.returncode == 2
        and "run alive lives: end it first, clawstream run end alive --yes" in done.stderr
    )
    done = call(
        "topics",
        "trim",
        "--yes",
        "--give-up",
        "quiet",
        "--format",
        "json",
        *overrides_of(settings),
        timeout_s=240,
    )
    assert done.returncode == 0, done.stderr
    (trim_range,) = (c for c in json.loads(done.stdout) if c["end"])
    assert trim_range == {
        "topic": topics.candidates, "partition": 1, "low": 0, "to": 1, "end": 3,
        "why": "run alive lives, since offset 1", "removed": True,
    }  # fmt: skip
    assert cluster.watermarks(topics.candidates, [1]) == {1: (1, 3)}


def plan(
    settings: Settings,
    cluster: Cluster,
    given_up: str = "",
    applied: int = 99,
    before_ms: int | None = None,
) -> dict[str, TrimRange]:
    """Return the range of each topic that would be trimmed if the lake had everything.

    The range is that of the runs' partition, or 0.
    """
    at = [
        (t, p)
        for t in cluster.topics()
        if t.startswith(f"{settings.kafka.topic_prefix}.")
        for p in range(4)
    ]
    kept = TrimInputs(
        dict.fromkeys(at, 99), dict.fromkeys(range(4), applied), before_ms, {given_up} - {""}
    )
    ranges = TopicTrim(cluster, settings, kept).ranges
    return {
        c.topic: c
        for c in ranges
        if c.partition == (PARTITION if c.topic == settings.kafka.topics.candidates else 0)
    }


def test_a_run_whose_decisions_are_not_seen_is_held(
    settings: Settings, cluster: Cluster, eventually: Eventually
) -> None:
    """An invisible topic may exist: its brokers are down, or the client may not describe it."""
    topics, mine = settings.kafka.topics, settings.model_copy(update={"run_id": OLD})
    create_topics(cluster, mine, [topics.ready_batches_spec(OLD, "train")])
    journal, producer = topics.ready_batches(OLD, "train"), cluster.producer()
    for event in (policy(run_id=OLD), cand("x", run_id=OLD), RunEnded(run_id=OLD, created_at=0)):
        producer.put(topics.candidates, OLD.encode(), CODEC.encode(event), partition=PARTITION)
    producer.flush()

    # the admission was killed before any decision: it may start again
    held = plan(settings, cluster)[topics.candidates]
    assert (
        held.to == 0
        and f"has ended at 2, but the admission of {OLD} (train) has read to 0" in held.why
    )
    assert plan(settings, cluster, OLD)[topics.candidates].to == 3

    applied = PolicyApplied(
        run_id=OLD, channel="train", policy=policy(run_id=OLD),
        input_topic_id=cluster.topic_id(topics.candidates), from_offset=2,
    )  # fmt: skip
    producer.put(journal, OLD.encode(), CODEC.encode(applied))
    producer.flush()
    producer.close()
    assert plan(settings, cluster)[topics.candidates].to == 3

    cluster.delete_topic(journal)
    eventually(lambda: journal not in cluster.topics())
    held = plan(settings, cluster)[topics.candidates]
    assert held.to == 0 and f"no decisions of it are seen (--give-up {OLD})" in held.why
    assert plan(settings, cluster, OLD)[topics.candidates].to == 3
    cluster.delete_topic(topics.steps)
    eventually(lambda: topics.steps not in cluster.topics())
    with pytest.raises(KafkaError, match=f"{topics.steps} is not seen"):
        plan(settings, cluster, OLD)


def test_rewards_that_came_before_their_steps_stay_with_them(
    settings: Settings, cluster: Cluster
) -> None:
    topics, producer, minute = settings.kafka.topics, cluster.producer(), 60_000
    for spec in topics.specs(1, -1):  # with their own timestamps, as copies have
        cluster.create_topic(
            spec.name, spec.partitions, {**spec.config, "message.timestamp.type": "CreateTime"}
        )
    now = int(time.time() * 1000)
    for at in (now - 50 * minute, now - 39 * minute, now - 10 * minute):
        producer.put(topics.rewards, b"k", b"x", timestamp_ms=at)
    producer.put(topics.steps, b"k", b"x", timestamp_ms=now - 30 * minute)
    producer.flush()
    producer.close()
    found = plan(settings, cluster, before_ms=now)[topics.rewards]
    assert settings.jobs.orphan_after_s == 600
    assert found.to == 1 and f"{topics.steps} has steps since then" in found.why
    assert plan(settings, cluster, before_ms=now, applied=0)[topics.rewards].to == 0

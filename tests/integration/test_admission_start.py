"""Start positions of admission: a new run starts at its own first record.

The installation may have written ticks for a long time before that record.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from support.admit import cand, policy
from support.patience import Patience

from clawstream.runtime.exit_codes import EXIT_SOURCE, exit_code
from clawstream.runtime.kafka import Cluster, Unavailable
from clawstream.runtime.topics.records import Decoder, create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    DeadLetter,
    Late,
    ReadyBatch,
    Refused,
    RunEnded,
    Tick,
    WeightVersion,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import CANDIDATE_PARTITIONS, partition_of
from clawstream.stream_jobs.admit import admitter as admitter_module
from clawstream.stream_jobs.admit.admitter import (
    BUDGET_INTERVAL_S,
    MAX_SEND_RECORDS,
    POLL_RECORDS,
    ChannelAdmitter,
)
from clawstream.stream_jobs.admit.decisions.checkpoint import (
    SAVE_AT_CLOSE,
    JournalPosition,
    serialize,
)
from clawstream.stream_jobs.admit.decisions.state import DecisionState
from clawstream.stream_jobs.admit.main import publish_policy
from clawstream.stream_jobs.admit.policy_log import PolicyLog
from clawstream.stream_jobs.admit.run_index import MAX_UNATTRIBUTED, PUBLISH_AFTER
from clawstream.stream_jobs.errors import UnreadableJournal

CODEC = Codec()
RUN = b"r"
PARTITION = partition_of(RUN, CANDIDATE_PARTITIONS)
PLACE = {"topic_id": b"payload", "partition": b"3", "first_offset": b"7", "last_offset": b"8"}
OLD = 6000
"""Number of ticks before the run: 1,500 seconds of 4 partitions."""


class Log:
    """The candidates of one installation."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self.cluster, self.topics, self.producer = (
            cluster,
            settings.kafka.topics,
            cluster.producer(),
        )
        self.time = 0

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.time += 1
            self.put(None, Tick(partition=self.time % 4, event_time=self.time // 4))
        self.producer.flush()

    def put(self, key: bytes | None, *events: Any) -> None:
        for event in events:
            value = event if isinstance(event, bytes) else CODEC.encode(event)
            self.producer.put(self.topics.candidates, key, value, PLACE, partition=PARTITION)

    @property
    def end(self) -> int:
        self.producer.flush()
        return self.cluster.watermarks(self.topics.candidates, [PARTITION])[PARTITION][1]

    def decisions(self, kind: type) -> list[Any]:
        return [
            d
            for d in self._committed(self.topics.ready_batches("r", "train"))
            if isinstance(d, kind)
        ]

    def groups_admitted(self) -> int:
        """Return what the last budget of channel train counts."""
        budgets = self._committed(self.topics.budgets)
        return [int(b.groups_admitted) for b in budgets if b.channel == "train"][-1]

    def letters(self) -> list[DeadLetter]:
        return self._committed(self.topics.dead_letters)

    def _committed(self, topic: str) -> list[Any]:
        """Return the committed records of a topic.

        A transaction becomes visible a moment after its commit; `await_open` reads all that the
        admitters have written.
        """
        return [CODEC.decode(r.value) for r in self.cluster.read_all(topic, await_open=True)]


@pytest.fixture
def mine(settings: Settings, cluster: Cluster) -> Settings:
    small = settings.admit.policy.model_copy(
        update={
            "group_size": 2,
            "batch_groups": 1,
            "required_rewards": ("rule",),
            "group_deadline_s": 1.0,
        }
    )
    changed = settings.model_copy(
        update={"run_id": "r", "admit": settings.admit.model_copy(update={"policy": small})}
    )
    create_topics(
        cluster,
        changed,
        [changed.kafka.topics.ready_batches_spec("r", channel) for channel in ("train", "val")],
    )
    return changed


@pytest.fixture
def log(mine: Settings, cluster: Cluster) -> Log:
    return Log(mine, cluster)


def opened(
    settings: Settings, cluster: Cluster, publish: bool = True
) -> tuple[ChannelAdmitter, ChannelAdmitter]:
    """Start admission of both channels, as the process does."""
    decoder = Decoder(cluster, settings.kafka.topics.schemas)
    train = ChannelAdmitter(settings, "train", cluster, decoder)
    val = ChannelAdmitter(settings, "val", cluster, decoder, train)
    if publish:
        publish_policy(settings, cluster, decoder, train)
    train.open()
    val.open()
    return train, val


def read_on(admitter: ChannelAdmitter) -> None:
    patience = Patience()
    while admitter.position < admitter.end:
        patience.check("the candidates are read")
        admitter.step(0.1)


def test_a_journal_made_anew_behind_trained_weights_is_refused(
    mine: Settings, cluster: Cluster, log: Log
) -> None:
    """Batches of the new journal count from 0, so the staleness limit would accept all of them."""
    journal = log.topics.ready_batches("r", "train")
    trained = WeightVersion(
        version_id="r/9.0",
        run_id="r",
        sync_index=9,
        attempt=0,
        format="full",
        files=(),
        channel="train",
        metrics={},
        created_at=0,
        batches_topic_id=cluster.topic_id(journal),
        first_batch_seq=8,
        last_batch_seq=8,
    )
    initial = replace(
        trained,
        version_id="r/0.0",
        batches_topic_id="gone",
        first_batch_seq=None,
        last_batch_seq=None,
    )
    other = replace(trained, version_id="other/9.0", run_id="other", batches_topic_id="gone")
    for version in (initial, other, trained):
        log.producer.put(log.topics.weights, version.version_id.encode(), CODEC.encode(version))
    log.producer.flush()
    for admitter in opened(mine, cluster):
        admitter.close()
    lost = replace(trained, version_id="r/10.0", batches_topic_id="gone")
    log.producer.put(log.topics.weights, b"r/10.0", CODEC.encode(lost))
    log.producer.flush()
    with pytest.raises(
        UnreadableJournal, match=r"recreated .* r/10\.0 was trained from batches up to 8"
    ) as raised:
        opened(mine, cluster)
    assert exit_code(raised.value) == EXIT_SOURCE


def test_a_new_run_begins_at_the_end_of_a_log_of_ticks(
    mine: Settings, cluster: Cluster, log: Log
) -> None:
    log.ticks(OLD // 2)
    log.put(b"other", cand("x", run_id="other"))
    log.put(None, b"garbage")
    log.ticks(OLD // 2)
    end = log.end
    admitters = opened(mine, cluster)
    for admitter in admitters:
        assert admitter.position == end - 4, (
            "the last tick of each partition, and nothing that trim does not keep"
        )
    assert [(d.key, d.reason) for d in log.letters()] == [(None, "undecodable")]
    now = log.time // 4
    log.put(
        RUN,
        cand("late", "g", closed_at=0),
        cand("a", "h", 1.0, closed_at=now),
        cand("b", "h", 0.0, closed_at=now),
    )
    log.ticks(4)
    assert log.end > end
    for admitter in admitters:
        read_on(admitter)
        admitter.close()
    (batch,) = log.decisions(ReadyBatch)
    assert [g.group_id for g in batch.groups] == ["h"]
    (refused,) = log.decisions(Refused)
    assert (refused.reason, refused.trajectory_ids) == ("incomplete", ("late",)), (
        "event time was known"
    )
    again = opened(mine, cluster)
    for admitter in again:
        read_on(admitter)
        admitter.close()
    assert len(log.letters()) == 1 and len(log.decisions(ReadyBatch)) == 1


def test_what_a_run_had_long_before_its_admission_is_found(
    mine: Settings, cluster: Cluster, log: Log
) -> None:
    """Find candidates, a policy published ahead, and the end of the run at any age."""
    log.ticks(8)
    first = log.end
    log.put(RUN, cand("a", value=1.0))
    log.ticks(OLD // 2)
    ahead = policy(policy_version=7, published_by="ann", reward_weights={"rule/exact": 2.0})
    log.put(RUN, ahead)
    log.ticks(OLD // 2)
    log.put(RUN, cand("b", value=0.0))
    log.ticks(8)
    (entry,) = PolicyLog(mine, cluster).entries
    assert entry.policy == ahead
    train, val = opened(mine, cluster, publish=False)
    assert train.position <= first and train.published().newest == ahead
    read_on(train)
    (batch,) = log.decisions(ReadyBatch)
    assert (batch.policy_version, [m.trajectory_id for m in batch.groups[0].members]) == (
        7,
        ["a", "b"],
    )
    log.put(RUN, RunEnded(run_id="r", created_at=0))
    log.ticks(OLD)
    log.put(RUN, cand("c"))
    log.producer.flush()
    policies = PolicyLog(mine, cluster)
    assert policies.ended is not None and len(policies.entries) == 1
    read_on(train)
    (refused,) = log.decisions(Refused)
    assert (refused.reason, refused.trajectory_ids) == ("run_ended", ("c",))
    for admitter in (train, val):
        admitter.close()


def test_the_index_of_runs_spares_the_scan(mine: Settings, cluster: Cluster, log: Log) -> None:
    """A second reader scans only what came after the index."""
    log.ticks(8)
    log.put(None, b"garbage")
    log.put(RUN, policy(published_by="ann"))
    log.ticks(PUBLISH_AFTER)
    scanned = list[int | None]()

    class Counting(Cluster):
        def read_all(self, topic: str, partition: int = 0, first: int | None = None, **more: Any):  # type: ignore[no-untyped-def]
            if topic == log.topics.candidates:
                scanned.append(first)
            return super().read_all(topic, partition, first, **more)

    for _ in range(2):
        counting = Counting(cluster.bootstrap_servers)
        (entry,) = PolicyLog(mine, counting).entries
        assert entry.policy.published_by == "ann"
    assert scanned[0] is None and (scanned[1] or 0) > PUBLISH_AFTER
    log.put(RUN, RunEnded(run_id="r", created_at=0))
    log.producer.flush()
    assert PolicyLog(mine, cluster).ended is not None
    admitters = opened(mine, cluster)
    assert [d.value for d in log.letters()] == [b"garbage"]
    for admitter in admitters:
        admitter.close()


class Away(Cluster):
    """A cluster that answers no question while it is `away`."""

    away = False

    def ask(self, timeout_s: float) -> None:
        if self.away:
            raise Unavailable("away")
        super().ask(timeout_s)


def test_while_kafka_is_away_the_budget_waits(mine: Settings, cluster: Cluster, log: Log) -> None:
    """An idle admission survives an outage; its last budget is published afterwards."""
    log.ticks(4)
    kafka = Away(cluster.bootstrap_servers)
    train, val = opened(mine, kafka)
    kafka.away = True
    log.put(RUN, cand("a", value=1.0), cand("b", value=0.0))
    assert log.end
    read_on(train)
    assert len(log.decisions(ReadyBatch)) == 1
    until = time.monotonic() + 2 * BUDGET_INTERVAL_S
    while time.monotonic() < until:
        train.step(0.05)
    assert log.groups_admitted() == 0
    kafka.away = False
    patience = Patience()
    while log.groups_admitted() == 0:
        patience.check("the budget counts the group")
        train.step(0.05)
    for admitter in (train, val):
        admitter.close()


def test_more_poison_than_is_kept_is_dead_lettered_all_the_same(
    mine: Settings, cluster: Cluster, log: Log
) -> None:
    log.ticks(8)
    log.put(None, *(b"garbage %d" % i for i in range(MAX_UNATTRIBUTED + 5)))
    log.ticks(OLD)
    admitter, _ = opened(mine, cluster)
    read_on(admitter)
    assert [d.value for d in log.letters()] == [
        b"garbage %d" % i for i in range(MAX_UNATTRIBUTED + 5)
    ]
    admitter.close()


def test_poison_before_a_run_is_dead_lettered_in_parts(
    mine: Settings, cluster: Cluster, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several transactions bound the memory; a restart repeats none of them."""
    monkeypatch.setattr(admitter_module, "MAX_SEND_BYTES", 20)
    garbage = [b"garbage %d" % i for i in range(7)]
    log.ticks(8)
    log.put(None, *garbage)
    log.ticks(OLD)
    for _ in range(2):
        admitters = opened(mine, cluster)
        assert [d.value for d in log.letters()] == garbage
        for admitter in admitters:
            admitter.close()


def test_a_checkpoint_spares_the_journal_and_is_never_needed(
    mine: Settings, cluster: Cluster, log: Log, eventually: Any
) -> None:
    """Use a checkpoint written at an orderly stop, and reach the same state without a usable one.

    The checkpoint then belongs to another journal, is damaged, or cannot be written.
    """
    log.ticks(4)
    groups = SAVE_AT_CLOSE // 2
    log.put(RUN, *(cand(f"{g}-{i}", f"g{g}", float(i)) for g in range(groups) for i in (0, 1)))
    log.producer.flush()
    first, other = opened(mine, cluster)
    read_on(first)
    eventually(lambda: len(log.decisions(ReadyBatch)) == groups)
    files = [
        mine.data_dir / "admit" / f"{mine.kafka.topic_prefix}-admit.r.{c}.checkpoint"
        for c in ("train", "val")
    ]
    for admitter in (first, other):
        admitter.close()
    assert [f.exists() for f in files] == [True, False], "channel val has decided nothing"
    whole = files[0].read_bytes()
    for revision, damage in enumerate((None, whole.replace(b"]", b")", 1), whole, b""), 1):
        if damage is not None:
            files[0].write_bytes(damage)
        if damage == b"":
            files[0].unlink()
            files[0].parent.rmdir()
            files[0].parent.write_bytes(b"no directory")
        read_before = len(log.decisions(object))
        admitter, other = opened(mine, cluster)
        assert admitter.journaled == {1: 0, 2: read_before, 3: 1 + 1, 4: read_before}[revision]
        assert (
            admitter.resume_point.next_seq == groups
            and len(admitter.resume_point.state.decisions) == 2 * groups
        )
        log.put(RUN, cand("7-0", "g7", 1.0, revision=revision))
        log.producer.flush()
        read_on(admitter)
        eventually(lambda n=revision: len(log.decisions(Late)) >= n)
        assert [d.revision for d in log.decisions(Late)] == list(range(1, revision + 1))
        for it in (admitter, other):
            it.close()


def test_a_journal_that_lost_its_end_is_read_from_its_beginning(
    mine: Settings, cluster: Cluster, log: Log
) -> None:
    """Ignore a checkpoint when the same topic holds other records.

    The checkpoint contains decisions that are not on the journal any more.
    """
    log.ticks(4)
    log.put(RUN, cand("a", "g", 0.0), cand("b", "g", 1.0))
    log.producer.flush()
    admitters = opened(mine, cluster)
    read_on(admitters[0])
    for admitter in admitters:
        admitter.close()
    path = mine.data_dir / "admit" / f"{mine.kafka.topic_prefix}-admit.r.train.checkpoint"
    journal = mine.kafka.topics.ready_batches("r", "train")
    foreign = DecisionState(next_seq=99)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(
        b"".join(
            serialize(
                foreign,
                JournalPosition.of(cluster.topic_id(journal), 1, b"what stood there"),
                CODEC,
            )
        )
    )
    admitters = opened(mine, cluster)
    assert (
        admitters[0].resume_point.next_seq == 1
        and len(admitters[0].resume_point.state.decisions) == 2
    )
    for admitter in admitters:
        admitter.close()


def test_poison_is_dead_lettered_once_whenever_admission_is_killed(
    mine: Settings, cluster: Cluster, log: Log, eventually: Any
) -> None:
    """The position is in the transaction with the dead letter, so no later commit is needed."""
    log.ticks(8)
    log.put(None, b"garbage 1")
    log.ticks(OLD)
    for _ in range(3):
        admitter, _ = opened(mine, cluster)
        eventually(log.letters)
        assert [d.value for d in log.letters()] == [b"garbage 1"], (
            "killed before it has read anything"
        )
    log.put(RUN, b"garbage 2")
    log.put(RUN, b"garbage 3")
    for _ in range(3):
        while len(log.letters()) < 3:
            admitter.step(0.1)
        admitter, _ = opened(mine, cluster)
    read_on(admitter)
    assert [d.value for d in log.letters()] == [b"garbage 1", b"garbage 2", b"garbage 3"]
    admitter.close()


def test_killed_while_it_catches_up_admission_dead_letters_nothing_twice(
    mine: Settings, cluster: Cluster, log: Log
) -> None:
    """Never commit a position below the position in the transaction with the dead letter."""
    log.ticks(8)
    admitter, _ = opened(mine, cluster)
    log.put(RUN, cand("a", "g", 1.0))
    log.ticks(3 * POLL_RECORDS)
    log.put(RUN, b"garbage")
    log.producer.flush()
    read_on(admitter)
    assert [d.value for d in log.letters()] == [b"garbage"]
    for _ in range(2):
        admitter, _ = opened(mine, cluster)
        patience = Patience()
        while not admitter.step(0.1):
            patience.check("the start reads")
        assert admitter.position < admitter.end, "killed, with its position committed as advice"
    admitter, _ = opened(mine, cluster)
    read_on(admitter)
    assert [d.value for d in log.letters()] == [b"garbage"]
    admitter.close()


def test_group_of_which_a_batch_drops_thousands(
    mine: Settings, cluster: Cluster, log: Log, eventually: Any
) -> None:
    """Each dropped member is a record of one transaction: more records than one put takes."""
    n, dropped = MAX_SEND_RECORDS + 1200, MAX_SEND_RECORDS + 1000
    small = mine.admit.policy.model_copy(update={"group_size": n, "min_members": 2})
    huge = mine.model_copy(update={"admit": mine.admit.model_copy(update={"policy": small})})
    log.put(RUN, *(cand(f"t{i}", "g", None if i < dropped else float(i)) for i in range(n)))
    log.producer.flush()
    admitter, _ = opened(huge, cluster)
    read_on(admitter)
    (batch,) = eventually(lambda: log.decisions(ReadyBatch))
    assert len(batch.groups[0].members) == n - dropped and len(log.decisions(Refused)) == dropped
    admitter.close()

"""Compare the topics and the lake after a fault test with the sent records.

The expected outputs come from an in-memory fold over the same logs.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.assemble import InMemoryPartition
from support.chaos_feed import Ack, name_of
from support.patience import until

from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    AdmissionPolicy,
    AssemblyDelta,
    AssemblyMarker,
    Candidate,
    Channel,
    Curation,
    DeadLetter,
    Late,
    ReadyBatch,
    Refused,
    Reward,
    RunEnded,
    SessionEvent,
    Step,
    StepMark,
    Tick,
    Trajectory,
)
from clawstream.schemas.records.trajectory_parts import joined
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.admit.decisions.journal import CandidateLog, Decision, InputRecord
from clawstream.stream_jobs.admit.fold import AdmissionFold
from clawstream.stream_jobs.assemble.changelog import accepts, changes_of, decode_record
from clawstream.stream_jobs.assemble.limits import limits_of
from clawstream.stream_jobs.assemble.state.changes import Closed, Revised
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, SourceTopic
from clawstream.stream_jobs.lake.main import dataset, open_table
from clawstream.stream_jobs.worker.payload import payload_place

FOLD_RECORDS = 500
TRAIN: Channel = "train"


class Outputs:
    """Follow the outputs of the jobs, for tests that wait for them."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        topics = settings.kafka.topics
        self._cluster = cluster
        self._wanted = [
            topics.trajectories,
            topics.candidates,
            topics.ready_batches(settings.run_id, TRAIN),
        ]
        self._decoder = Decoder(cluster, topics.schemas)
        self._reader = cluster.reader("tests", {})
        self.steps: set[str] = set()
        """Steps that are in a closed trajectory or are marked late for one."""
        self.groups: dict[str, str] = {}
        """Trajectory to group, for all candidates."""
        self.decided: set[str] = set()
        """Trajectories that were admitted or refused."""
        self.batches = 0
        self.event_times: dict[int, int] = {}
        """Progress of assemble in each source partition, outputs included: log timestamp in ms."""

    def look(self, timeout_s: float = 1.0) -> None:
        """Read to the current end, for at most `timeout_s`."""
        there = self._cluster.topics() if self._wanted else {}
        for topic in [t for t in self._wanted if t in there]:
            self._wanted.remove(topic)
            self._reader.add({(topic, p): 0 for p in range(there[topic])})
        deadline = time.monotonic() + timeout_s
        while records := self._reader.poll(2000, 0.1):
            for record in records:
                self._take(self._decoder.decode(record.value))
            if time.monotonic() > deadline:
                return

    def _take(self, event: object) -> None:
        match event:
            case Trajectory():
                self.steps.update(s.step_id for s in event.steps)
            case StepMark():
                self.steps.add(event.step_id)
            case Candidate():
                self.groups[event.trajectory_id] = event.group_id
            case Tick(event_time=int(at)):
                self.event_times[event.partition] = max(
                    at, self.event_times.get(event.partition, at)
                )
            case ReadyBatch():
                self.batches += 1
                self.decided.update(m.trajectory_id for g in event.groups for m in g.members)
            case Refused():
                self.decided.update(event.trajectory_ids)


@dataclass
class Logs:
    """All records of the topics of a settled installation, read once."""

    settings: Settings
    inputs: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Type to name to the number of copies."""
    folds: list[InMemoryPartition] = field(default_factory=list)
    """Result of the in-memory fold of each input partition."""
    payload: dict[tuple[str, int], list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """Records by trajectory and part."""
    candidates: dict[tuple[str, int], list[bytes]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Records by trajectory and revision."""
    marks: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    letters: dict[tuple[str, int, int], list[bytes]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Dead letters by source position."""
    times: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    """(topic, partition) of an output to the log timestamps of its records in ms, without ticks."""
    entries: list[InputRecord] = field(default_factory=list)
    """The log of candidates that admission reads."""
    decisions: list[Decision] = field(default_factory=list)
    """The decisions in the journal."""
    journal_end: int = 0
    """One past the last offset of the journal."""
    batch_times: list[int] = field(default_factory=list)
    """Log timestamps of the batches in the journal, ms."""

    @classmethod
    def read(cls, settings: Settings, cluster: Cluster) -> Logs:
        out, topics = cls(settings), settings.kafka.topics
        decoder = Decoder(cluster, topics.schemas)

        def decoded(topic: str, partition: int) -> Iterator[tuple[Record, Any]]:
            for record in cluster.read_all(topic, partition):
                event = decoder.decode(record.value)
                if not isinstance(event, Tick):
                    out.times[topic, partition].append(record.timestamp_ms)
                yield record, event

        for p in range(settings.kafka.partitions):
            sources: Iterable[tuple[SourceTopic, str]] = (
                (STEPS, topics.steps),
                (REWARDS, topics.rewards),
            )
            logs = [[(s, r, e) for r, e in decoded(t, p)] for s, t in sources]
            out._inputs(heapq.merge(*logs, key=lambda taken: taken[1].timestamp_ms))
            for record, event in decoded(topics.trajectories, p):
                out._output(record, event)
        for p in range(cluster.topics(topics.candidates)[topics.candidates]):
            mine = p == partition_of(
                settings.run_id.encode(), cluster.topics(topics.candidates)[topics.candidates]
            )
            for record, event in decoded(topics.candidates, p):
                out._output(record, event)
                if mine and isinstance(event, Candidate | AdmissionPolicy | RunEnded | Tick):
                    place = payload_place(record.headers) if isinstance(event, Candidate) else None
                    out.entries.append(InputRecord(record.offset, event, place))
        for record, event in decoded(topics.dead_letters, 0):
            out._output(record, event)
        out._await_admission(cluster)
        journal = topics.ready_batches(settings.run_id, TRAIN)
        end = out.entries[-1].offset + 1 if out.entries else 0
        for record, event in decoded(journal, 0):
            if isinstance(event, ReadyBatch | Refused) and event.input_to > end:
                break  # decided by a tick that came after the candidates were read
            out.decisions.append(event)
            out.journal_end = record.offset + 1
            if isinstance(event, ReadyBatch):
                out.batch_times.append(record.timestamp_ms)
        return out

    def _await_admission(self, cluster: Cluster) -> None:
        """Wait until the journal holds all decisions that follow from the candidates read.

        Ticks cause decisions too, and come all the time.
        """
        candidates = self.settings.kafka.topics.candidates
        at = (
            candidates,
            partition_of(self.settings.run_id.encode(), cluster.topics(candidates)[candidates]),
        )
        group = f"{self.settings.kafka.topic_prefix}-admit.{self.settings.run_id}.{TRAIN}"
        end = self.entries[-1].offset + 1 if self.entries else 0
        until(
            lambda: cluster.committed(group).get(at, 0) >= end,
            f"admission has not read {at} to {end}",
        )

    def _inputs(self, records: Iterable[tuple[SourceTopic, Record, Any]]) -> None:
        fold, batch = InMemoryPartition(limits=limits_of(self.settings)), []
        for source, record, event in records:
            if isinstance(event, Step | SessionEvent | Reward | Curation):
                self.inputs[type(event).__name__][name_of(event)] += 1
            batch.append((source, record.offset, record.timestamp_ms, event))
            if len(batch) >= FOLD_RECORDS:
                fold.batch(batch)
                batch = []
        self.folds.append(fold.batch(batch))

    def _output(self, record: Record, event: Any) -> None:
        value = record.value or b""
        match event:
            case Trajectory():
                self.payload[event.trajectory_id, event.part].append(value)
            case StepMark():
                self.marks[event.event_id].append(value)
            case Candidate():
                self.candidates[event.trajectory_id, event.revision].append(value)
            case DeadLetter():
                self.letters[event.topic, event.partition, event.offset].append(value)

    # -- the checks; each returns its counts

    def check(self, acks: list[Ack]) -> dict[str, Any]:
        """Check every property of the topics. Returns figures for the test's output."""
        sent = self._check_nothing_lost(acks)
        twice = self._check_sent_again_with_the_same_bytes()
        self._check_content()
        return {**sent, "sent_again": twice, **self._check_admission()}

    def _check_nothing_lost(self, acks: list[Ack]) -> dict[str, int]:
        """Check that each acknowledged record is on the log.

        A record is there at least once for each acknowledgement. More copies come from sends
        without an acknowledgement.
        """
        sent: dict[str, Counter[str]] = defaultdict(Counter)
        for ack in acks:
            sent[ack.kind][ack.id] += 1
        for kind, names in sent.items():
            lost = names - self.inputs[kind]
            assert not lost, f"{len(lost)} acknowledged {kind} are not on the log: {list(lost)[:5]}"
            more = self.inputs[kind].keys() - names.keys()
            # The reward job writes to this topic as well.
            assert kind == "Reward" or not more, f"{kind} that nobody sent: {list(more)[:5]}"
        return {f"{kind.lower()}s": len(names) for kind, names in sent.items()}

    def _check_sent_again_with_the_same_bytes(self) -> int:
        """Return the number of outputs that are on the log a second time."""
        twice = 0
        for what in (self.payload, self.candidates, self.marks, self.letters):
            for name, values in what.items():
                assert len(set(values)) == 1, f"{name} was sent again with other bytes"
                twice += len(values) - 1
        return twice

    def _check_content(self) -> None:
        """Check that the outputs equal the fold of the logs, whichever processes were killed.

        The outputs are closed trajectories, their last revisions, marks and dead letters.
        """
        decode = Codec().decode
        expected: dict[str, Trajectory] = {}
        last: dict[str, Candidate] = {}
        marks: set[tuple[str, str]] = set()
        letters: set[tuple[str, int, int]] = set()
        topics = self.settings.kafka.topics
        for p, fold in enumerate(self.folds):
            expected |= fold.trajectories
            last |= {t: replace(fold.last(t), revision=0) for t in fold.trajectories}
            marks |= {(m.step_id, m.kind) for m in fold.marks}
            letters |= {
                (topics.steps if b.source == STEPS else topics.rewards, p, b.offset)
                for b in fold.dead_letters
            }
        found: dict[str, list[Trajectory]] = defaultdict(list)
        for (_, _), values in sorted(self.payload.items()):
            part = decode(values[0])
            assert isinstance(part, Trajectory)
            found[part.trajectory_id].append(part)
        _same("closed trajectories", {t: joined(parts) for t, parts in found.items()}, expected)
        newest: dict[str, Candidate] = {}
        revisions: dict[str, set[int]] = defaultdict(set)
        for (name, revision), values in sorted(self.candidates.items()):
            revisions[name].add(revision)
            made = decode(values[0])
            assert isinstance(made, Candidate)
            newest[name] = replace(made, revision=0)
        _same("last revisions", newest, last)
        holes = [t for t, seen in revisions.items() if seen != set(range(len(seen)))]
        assert not holes, f"revisions are missing: {holes[:5]}"
        made_marks = [decode(values[0]) for values in self.marks.values()]
        assert {(m.step_id, m.mark) for m in made_marks if isinstance(m, StepMark)} == marks
        assert self.letters.keys() == letters

    def _check_admission(self) -> dict[str, Any]:
        """Check that each batch is there once and each trajectory is decided once.

        The journal must equal a fold of the candidates, decision by decision.
        """
        topic_id = next(
            d.input_topic_id for d in self.decisions if isinstance(d, ReadyBatch | Refused)
        )
        fold = AdmissionFold(
            self.settings.run_id, TRAIN, CandidateLog(topic_id, 0, self.settings.kafka.partitions)
        )
        expected = [d for e in self.entries for d in fold.fold(e)]
        assert [_gist(d) for d in self.decisions if not isinstance(d, Late)] == [
            _gist(d) for d in expected if not isinstance(d, Late)
        ]
        batches = [d for d in self.decisions if isinstance(d, ReadyBatch)]
        assert [b.batch_seq for b in batches] == list(range(len(batches)))
        rounds = Counter((g.group_id, g.round) for b in batches for g in b.groups)
        assert set(rounds.values()) <= {1}, "a round of a group is in two batches"
        admitted = [m.trajectory_id for b in batches for g in b.groups for m in g.members]
        refused = [t for d in self.decisions if isinstance(d, Refused) for t in d.trajectory_ids]
        assert len(set(admitted)) == len(admitted), "a trajectory is in two batches"
        assert not set(admitted) & set(refused)
        everyone = {t for t, _ in self.candidates}
        open_ = everyone - set(admitted) - set(refused)
        assert everyone == {*admitted, *refused, *open_} and {*admitted, *refused} <= everyone
        # Enough trajectories must have passed all jobs, otherwise these checks prove little.
        assert len(admitted) > len(everyone) / 4, (
            f"only {len(admitted)} of {len(everyone)} trajectories were admitted"
        )
        return {
            "trajectories": len(everyone), "batches": len(batches), "admitted": len(admitted),
            "refused": len(set(refused)), "open": len(open_),
        }  # fmt: skip

    def check_decisions(self, cluster: Cluster) -> dict[str, int]:
        """Check that an owner has decided each output.

        Changelog records of a fenced worker do not count, here as in assemble. The changelog must
        be whole: no snapshot has trimmed it. Returns the number of its records that do not count.
        """
        topic, decoder = (
            self.settings.kafka.topics.assembly,
            Decoder(cluster, self.settings.kafka.topics.schemas),
        )
        closed, revised, fenced = Counter[str](), Counter[str](), 0
        for p in range(self.settings.kafka.partitions):
            epoch, seq = -1, 0
            for record in cluster.read_all(topic, p):
                event = decode_record(decoder, record)
                if not accepts(record.offset, event, epoch):
                    fenced += 1
                    continue
                epoch = record.offset if isinstance(event, AssemblyMarker) else event.epoch
                if isinstance(event, AssemblyDelta) and event.seq > seq:
                    assert event.seq == seq + 1, f"{topic}-{p} is not whole"
                    seq = event.seq
                    for change in changes_of(event):
                        if isinstance(change, Closed):
                            closed[change.key[1]] += 1
                        elif isinstance(change, Revised):
                            revised[change.key[1]] += 1
        assert closed == Counter({t for t, _ in self.payload}), (
            "others are closed, or oftener, than was decided"
        )
        assert revised == Counter(t for t, _ in self.candidates), (
            "there are other revisions than were decided"
        )
        return {"fenced_records": fenced, "decisions": sum(closed.values()) + sum(revised.values())}

    def check_lake(self) -> None:
        """Check that the tables hold the records of the topics, each once."""
        inputs = self.inputs
        rows: dict[tuple[str, str], Iterable[str]] = {
            ("steps", "step_id"): inputs["Step"],
            ("session_events", "event_id"): inputs["SessionEvent"],
            ("rewards", "event_id"): inputs["Reward"],
            ("curation", "event_id"): inputs["Curation"],
            ("step_marks", "event_id"): self.marks,
        }
        for (table, column), names in rows.items():
            assert Counter(self._column(table, column)) == dict.fromkeys(names, 1), table
        parts = zip(
            self._column("trajectories", "trajectory_id"),
            self._column("trajectories", "part"),
            strict=True,
        )
        assert Counter(parts) == dict.fromkeys(self.payload, 1)
        made = zip(
            self._column("candidates", "trajectory_id"),
            self._column("candidates", "revision"),
            strict=True,
        )
        assert Counter(made) == dict.fromkeys(self.candidates, 1)
        assert len(self._column("dead_letters", "offset")) == len(self.letters)
        batches = [d for d in self.decisions if isinstance(d, ReadyBatch)]
        groups = sum(len(b.groups) for b in batches) + sum(
            isinstance(d, Refused) for d in self.decisions
        )
        # A deadline may have passed since the logs were read, so records after their end are left
        # out.
        for table, count in (("batches", len(batches)), ("groups", groups)):
            offsets = self._column(table, "kafka_offset")
            assert sum(offset < self.journal_end for offset in offsets) == count, table
        assert len(set(seqs := self._column("batches", "batch_seq"))) == len(seqs)

    def _column(self, table: str, name: str) -> list[Any]:
        uri = self.settings.lake_uri
        assert (Path(uri) / table / "_delta_log").is_dir(), f"no table {table}"
        found = dataset(open_table(uri, table, {}), {}).to_table(columns=[name])
        return found.column(name).to_pylist()  # type: ignore[no-any-return]

    def pause_of_batches_s(self, since_ms: int, until_ms: int) -> float:
        """Return the longest time between two batches, by log timestamps."""
        inside = [t for t in self.batch_times if since_ms <= t <= until_ms]
        return max((b - a for a, b in pairwise([since_ms, *inside, until_ms])), default=0) / 1000

    def pause_of_trajectories_s(self, since_ms: int, until_ms: int) -> float:
        """Return the longest time without output of an assemble partition, by log timestamps."""
        topic, longest = self.settings.kafka.topics.trajectories, 0
        for p in range(self.settings.kafka.partitions):
            inside = [t for t in self.times[topic, p] if since_ms <= t <= until_ms]
            longest = max(longest, *(b - a for a, b in pairwise([since_ms, *inside, until_ms])))
        return longest / 1000


def _same(what: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two dicts and report only the differences, because there are thousands of entries."""
    assert found.keys() == expected.keys(), f"{what}: {list(found.keys() ^ expected.keys())[:5]}"
    different = [name for name in expected if found[name] != expected[name]]
    assert not different, (
        f"{len(different)} {what} differ, e.g.\n{found[different[0]]}\n{expected[different[0]]}"
    )


def _gist(decision: Decision) -> object:
    """Return the content of a decision without the fields that a restart may change."""
    match decision:
        case ReadyBatch():
            return decision.content_hash
        case Refused():
            return decision.group_id, decision.round, decision.trajectory_ids, decision.reason
        case _:
            return type(decision).__name__

"""The index of runs on one partition of the candidates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from support.admit import cand, policy, tick

from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.foreign import fingerprint_of
from clawstream.schemas.codec.single_object import MAGIC, Codec, shipped
from clawstream.schemas.records import RunEnded
from clawstream.schemas.topics import Topics
from clawstream.stream_jobs.admit import run_index
from clawstream.stream_jobs.admit.run_index import RunFinder, RunOffsets

CODEC = Codec()
TOPICS = Topics("claw")


class Logs:
    """Partition 2 of the candidates, and the topics of the indexes and schemas, in memory."""

    def __init__(self) -> None:
        self.codec, self.id = Codec(), "topic-1"
        self.announced: list[str] = []
        self.logs: dict[str, list[Record]] = {
            topic: [] for topic in (TOPICS.candidates, TOPICS.runs, TOPICS.schemas)
        }
        self.low = 0
        self.scanned = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """Called once, before the indexes are read."""

    def put(self, topic: str, key: bytes | None, value: Any) -> None:
        log, encoded = self.logs[topic], value if isinstance(value, bytes) else CODEC.encode(value)
        log.append(Record(topic, 2, len(log), 7, key, encoded, {}))

    def add(self, *records: tuple[bytes | None, Any]) -> None:
        for key, value in records:
            self.put(TOPICS.candidates, key, value)

    def decode(self, value: bytes | None) -> Any:
        return self.codec.decode(value)

    def look_up(self) -> bool:
        news, self.announced = self.announced, []
        for schema in news:
            self.codec.announce(schema)
        return bool(news)

    def topic_id(self, topic: str) -> str:
        return self.id

    def topics(self) -> dict[str, int]:
        return dict.fromkeys(self.logs, 4)

    def watermarks(self, topic: str, partitions: list[int]) -> dict[int, tuple[int, int]]:
        return {partitions[0]: (self.low, len(self.logs[topic]))}

    def read_all(
        self, topic: str, partition: int = 0, first: int | None = None
    ) -> Iterator[Record]:
        if topic == TOPICS.runs:
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
        records = self.logs[topic][first or (self.low if topic == TOPICS.candidates else 0) :]
        self.scanned += len(records) if topic == TOPICS.candidates else 0
        return iter(records)

    def read_ranges(
        self, topic: str, partition: int, ranges: Iterable[tuple[int, int]]
    ) -> Iterator[Record]:
        return (self.logs[topic][o] for first, last in ranges for o in range(first, last + 1))

    def producer(self) -> Logs:
        return self

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def found(logs: Logs) -> RunFinder:
    """Return the runs as the next process finds them."""
    finder = RunFinder(cast(Cluster, logs), cast(Decoder, logs), TOPICS, 2)
    finder.read()
    return finder


@pytest.fixture
def logs() -> Logs:
    made = Logs()
    made.add(
        (None, tick(1)),
        (b"a", cand("x", run_id="a")),
        (b"b", policy(run_id="b")),
        (b"no run!", cand("x")),
        (b"a", policy(run_id="a")),
        (b"c", b"garbage"),
        (b"b", RunEnded(run_id="a", created_at=0)),
        (None, tick(2)),
        (b"a", RunEnded(run_id="a", created_at=0)),
        (b"a", RunEnded(run_id="a", created_at=0)),
        (b"d", b""),
        (None, b"no key"),
    )
    return made


def test_runs_are_found_by_their_keys(logs: Logs) -> None:
    finder = found(logs)
    assert finder.runs == {
        "a": RunOffsets(1, 9, [4], 8),
        "b": RunOffsets(2, 6, [2]),  # the end of another run does not affect this one
        "c": RunOffsets(5, 5),
        "d": RunOffsets(10, 10),
    }
    assert finder.unattributed == [3, 11] and finder.read_to == 12
    assert [(e.offset, e.event) for e in finder.events("a")] == [
        (4, policy(run_id="a")),
        (8, RunEnded(run_id="a", created_at=0)),
    ]
    assert [e.offset for e in finder.events("a", 5)] == [8] and finder.events("none") == []


@pytest.mark.parametrize(
    ("run_id", "first", "offset"),
    [("a", 0, 1), ("a", 5, 5), ("a", 10, 12), ("none", 0, 12), ("none", 15, 15), ("d", 10, 10)],
)
def test_no_record_of_the_run_is_before_the_next_offset(
    logs: Logs, run_id: str, first: int, offset: int
) -> None:
    assert found(logs).next_offset(run_id, first) == offset


def test_a_published_index_gives_what_a_scan_gives(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = found(logs)
    assert logs.logs[TOPICS.runs] == [], "too short a scan to be worth it"
    monkeypatch.setattr(run_index, "PUBLISH_AFTER", 10)
    found(logs)
    assert len(logs.logs[TOPICS.runs]) == 1
    schemas = {CODEC.decode(record.value).name for record in logs.logs[TOPICS.schemas]}
    assert "clawstream.RunIndex" in schemas, "other releases can read it"
    logs.scanned = 0
    again = found(logs)
    assert (again.runs, again.unattributed, again.read_to) == (
        whole.runs,
        whole.unattributed,
        whole.read_to,
    )
    assert logs.scanned == 0
    logs.add((None, tick(3)), (b"d", policy(run_id="d")), (b"e", cand("x", run_id="e")))
    later = found(logs)
    assert logs.scanned == 3
    assert later.runs["d"] == RunOffsets(10, 13, [13]) and later.runs["e"] == RunOffsets(14, 14)


def test_an_index_of_another_log_is_not_used(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "PUBLISH_AFTER", 1)
    found(logs)
    del logs.logs[TOPICS.candidates][5:]
    shorter = found(logs)
    assert shorter.runs["a"] == RunOffsets(1, 4, [4]), "the log has lost its end"
    logs.id, logs.logs[TOPICS.candidates] = "topic-2", []
    logs.add((b"a", cand("x", run_id="a")))
    assert found(logs).runs == {"a": RunOffsets(0, 0)}, "the topic was recreated"
    logs.logs[TOPICS.runs] = []
    logs.put(TOPICS.runs, b"2", b"garbage")
    assert found(logs).runs == {"a": RunOffsets(0, 0)}


def test_an_index_that_another_process_publishes_meanwhile_is_used(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "PUBLISH_AFTER", 1)

    def meanwhile() -> None:
        logs.add((b"e", cand("x", run_id="e")))
        found(logs)
        logs.scanned = 0

    logs.meanwhile = meanwhile
    assert found(logs).runs["e"] == RunOffsets(12, 12)
    assert logs.scanned == 0


def test_what_was_trimmed_is_not_in_the_index(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_index, "PUBLISH_AFTER", 1)
    found(logs)
    logs.low = 6
    finder = found(logs)
    assert finder.runs == {
        "a": RunOffsets(6, 9, [], 8),
        "b": RunOffsets(6, 6),
        "d": RunOffsets(10, 10),
    }
    assert finder.unattributed == [11]
    assert [r.offset for r in finder.records(iter([3, 7]))] == [7]


def test_beyond_the_limit_unattributed_records_are_read_from_the_log(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "MAX_UNATTRIBUTED", 1)
    monkeypatch.setattr(run_index, "PUBLISH_AFTER", 1)
    for _ in range(2):
        finder = found(logs)
        assert finder.unattributed == [3]
        assert [finder.next_offset("none", first) for first in (0, 11, 12)] == [11, 11, 12]


def of_another_release(logs: Logs, event: Any) -> bytes:
    """Return a record with one more field, whose schema is announced but not looked up yet."""
    plain = shipped(type(event).__name__)
    more = {"name": "more", "type": ["null", "string"], "default": None, "doc": "More."}
    schema = {**plain, "fields": [*plain["fields"], more]}
    logs.announced.append(json.dumps(schema))
    return MAGIC + bytes.fromhex(fingerprint_of(schema)) + CODEC.encode(event)[10:] + b"\0"


def test_records_of_another_release_are_what_they_are() -> None:
    """A candidate is no policy, an end is an end, and a tick is not unattributed."""
    logs = Logs()
    logs.add(
        (b"a", of_another_release(logs, cand("x", run_id="a"))),
        (b"a", of_another_release(logs, RunEnded(run_id="a", created_at=0))),
        (None, of_another_release(logs, tick(1))),
    )
    finder = found(logs)
    assert finder.runs == {"a": RunOffsets(0, 1, [], 1)} and finder.unattributed == []


def test_a_record_of_an_unknown_schema_may_be_a_policy() -> None:
    logs = Logs()
    logs.add((b"a", of_another_release(logs, policy(run_id="a"))))
    logs.announced.clear()
    assert found(logs).runs == {"a": RunOffsets(0, 0, [0])}

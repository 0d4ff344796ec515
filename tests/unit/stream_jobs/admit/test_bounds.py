"""Bounds, in records and bytes, on unattributed records and on sends in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from runtime.kafka import Cluster, Record
from runtime.topics.records import Decoder
from schemas.codec.single_object import Codec
from stream_jobs.admit import policy_log
from stream_jobs.admit.admitter import MAX_SEND_BYTES, MAX_SEND_RECORDS, SendLimit
from stream_jobs.admit.policy_log import RunLog

AT = ("candidates", 0)


class Source:
    """A topic whose records name no run."""

    def __init__(self, sizes: list[int]) -> None:
        self.records = [
            Record(*AT, i, 0, b"No_Run", b"x" * size, {"h": b"yyyy"})
            for i, size in enumerate(sizes)
        ]
        self.codec = Codec()

    def watermarks(self, topic: str, partitions: Any) -> dict[int, tuple[int, int]]:
        return {0: (0, len(self.records))}

    def read_all(self, topic: str, partition: int, first: int | None = None) -> Iterator[Record]:
        return iter(self.records[first or 0 :])


def test_strays_are_kept_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size counts key, value and headers.

    From the first record that is not kept, the topic is read again, so that no record is missed.
    """
    monkeypatch.setattr(policy_log, "MAX_UNATTRIBUTED_BYTES", 100)
    source = Source([30, 30, 30, 5, 1])
    log = RunLog(cast(Cluster, source), cast(Decoder, source), AT, "r")
    for _ in range(2):
        log.read(0)
        assert [r.offset for r in log.unattributed] == [0, 1, 3], (
            "30 bytes more are too many, 5 are not"
        )
        assert log.next_run_offset(0) == 2
    log.read(1)
    assert log.next_run_offset(3) == 4
    log._from = None  # reads from the start, like the first call
    log.read(1)
    assert [r.offset for r in log.unattributed] == [1, 2, 3] and log.next_run_offset(1) == 4


@pytest.mark.parametrize(
    ("sizes", "waits"),
    [
        ([1] * MAX_SEND_RECORDS, []),
        ([1] * (2 * MAX_SEND_RECORDS + 1), [MAX_SEND_RECORDS, 2 * MAX_SEND_RECORDS]),
        ([MAX_SEND_BYTES // 4] * 9, [4, 8]),
        ([MAX_SEND_BYTES + 1, 1, MAX_SEND_BYTES, 1], [1, 2, 3]),
    ],
)
def test_a_transaction_waits_before_too_much_is_on_its_way(
    sizes: list[int], waits: list[int]
) -> None:
    waited, begun = list[int](), 0
    limit = SendLimit(lambda: waited.append(begun))
    for begun, size in enumerate(sizes):  # noqa: B007 - the limit's callback reads it
        limit.before(size)
    assert waited == waits

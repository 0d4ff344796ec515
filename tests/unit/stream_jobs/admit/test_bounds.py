"""Bounds, in records and bytes, on unattributed records and on sends in flight."""

from __future__ import annotations

import pytest

from clawstream.stream_jobs.admit.admitter import MAX_SEND_BYTES, MAX_SEND_RECORDS, SendLimit

AT = ("candidates", 0)


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

"""Test how the jobs handle an input that retention cut ahead of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from clawstream.runtime.kafka import Cluster, SourceTruncated
from clawstream.runtime.kafka.truncation import check_truncation


class Log:
    """Act as a partition that begins at `low`."""

    def __init__(self, low: int) -> None:
        self.low = low

    def watermarks(self, topic: str, partitions: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        return dict.fromkeys(partitions, (self.low, 2000))


def test_a_hole_is_an_error_when_the_log_begins_behind_what_was_due() -> None:
    def come(low: int) -> None:
        check_truncation(cast(Cluster, cast(Any, Log(low))), "claw.steps", 0, 500, 1000)

    come(0)
    come(500)  # control records of a transaction, at the start
    with pytest.raises(
        SourceTruncated, match=r"claw\.steps-0 begins at offset 501; 500 was due and 1000 came"
    ):
        come(501)

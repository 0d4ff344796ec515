"""Dead letters of records, whatever their reason contains."""

from __future__ import annotations

import pytest

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import DETAIL_CHARS, dead_letter
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import DeadLetter


@pytest.mark.parametrize("detail", ["half a pair: \ud800", "\ud800" * DETAIL_CHARS, "x" * 100_000])
def test_any_detail_can_be_written(detail: str) -> None:
    record = Record("steps", 0, 7, 0, None, b"garbage", {})
    letter = dead_letter(record, "T", "assemble", "invalid", detail)
    codec = Codec()
    written = codec.decode(codec.encode(letter))
    assert isinstance(written, DeadLetter) and written == letter
    assert 0 < len(written.detail) <= DETAIL_CHARS

"""The metadata of a commit: what a consumer says, and what any other client may have written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.runtime.kafka import NO_METADATA, Commit, CommitMetadata, heartbeat


@given(st.integers(0, 2**40), st.none() | st.integers(0, 2**40))
def test_what_is_handled_beyond_the_position_is_read_back(offset: int, beyond: int | None) -> None:
    handled = None if beyond is None else offset + beyond
    text = str(heartbeat(CommitMetadata(handled=handled)))
    assert Commit(offset, text).handled == (offset if handled is None else handled)


@pytest.mark.parametrize(
    "text", ["", "AgAAAZ", "{}", "[1]", "7", '{"handled":"9"}', '{"handled":null}', '{"handled":3}']
)
def test_other_metadata_says_nothing(text: str) -> None:
    assert Commit(5, text).handled == 5


def test_nothing_to_say_is_no_metadata() -> None:
    assert str(NO_METADATA) == ""
    assert str(CommitMetadata(handled=7)) == '{"handled":7}'

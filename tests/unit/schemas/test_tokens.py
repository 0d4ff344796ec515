"""The fingerprint of a tokenizer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clawstream.schemas.tokens import fingerprint

VOCABULARIES = st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=4)


@given(VOCABULARIES, VOCABULARIES)
def test_fingerprints_are_equal_exactly_for_equal_vocabularies(
    one: dict[str, int], other: dict[str, int]
) -> None:
    assert fingerprint(dict(reversed(one.items()))) == fingerprint(one)
    assert (fingerprint(one) == fingerprint(other)) == (one == other)


def test_a_token_may_be_half_of_a_surrogate_pair() -> None:
    assert len(fingerprint({"\ud800": 0})) == 16

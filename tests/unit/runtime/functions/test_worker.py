"""What a child process makes of a function's answer."""

from __future__ import annotations

import pytest

from runtime.functions.worker import to_builtins
from schemas.rule_spec import REASON_CHARS


class OwnText(str):
    """A text that slices to itself."""

    __slots__ = ()

    def __getitem__(self, key: object) -> OwnText:
        return self


class OwnBytes(bytes):
    """Bytes of a user's class."""


@pytest.mark.parametrize(
    ("answer", "kind"), [(OwnText("a" * 500), str), (OwnBytes(b"a" * 500), bytes)]
)
def test_a_text_loses_its_class(answer: object, kind: type) -> None:
    plain = to_builtins(answer)
    assert type(plain) is kind and len(plain) == REASON_CHARS

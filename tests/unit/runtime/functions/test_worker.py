"""What a child process makes of a function's answer."""

from __future__ import annotations

import json

import numpy as np
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


def test_numbers_of_numpy_are_numbers_wherever_they_stand() -> None:
    answer = [
        *(np.float32(0.5), np.int64(2), np.bool_(True), np.array(0.25), np.array([1.0, 2.0])),
        *((np.float32(0.5), {"n": np.int64(3)}), {"k~0.0": np.array([0.5])}),
    ]
    plain = to_builtins(answer)
    assert plain == [0.5, 2, True, 0.25, [1.0, 2.0], [0.5, {"n": 3}], {"k~0.0": 0.5}]
    assert json.loads(json.dumps(plain)) == plain

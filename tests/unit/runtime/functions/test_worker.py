"""What a child process makes of a function's answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clawstream.runtime.functions.worker import answer_call, failure, to_builtins
from clawstream.schemas.rule_spec import REASON_CHARS
from clawstream.schemas.user_function import load_function, progress


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


def test_the_time_of_a_call_begins_again_with_progress() -> None:
    async def long(parts: int) -> float:
        for _ in range(parts):
            await asyncio.sleep(0.2)
            progress()
        return 1.0

    async def silent(_: int) -> float:
        await asyncio.Event().wait()
        return 1.0

    told = list[tuple[int, Any]]()
    with asyncio.Runner() as runner:
        for function in (long, silent):
            answer_call(function, [15], 2.0, runner, lambda *one: told.append(one), ())
    answers = [(kind, value) for _, (kind, value) in told if kind != "progress"]
    assert answers == [("answer", 1.0), ("raised", "timeout")] and len(told) > 4


def test_an_error_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    (tmp_path / "place_inner.py").write_text("def look(given):\n    return given['gold']\n")
    (tmp_path / "place_outer.py").write_text(
        "import place_inner\ndef f(given):\n    return place_inner.look(given)\n"
    )
    function = load_function("place_outer.py:f", [tmp_path])
    told = list[Any]()
    for folders in ([tmp_path], []):
        answer_call(function, [{}], 1.0, None, lambda _, one: told.append(one), folders)
    assert told == [
        ("raised", "KeyError: 'gold' (place_inner.py, line 2)"),
        ("raised", "KeyError: 'gold'"),
    ]
    (kind, reason) = failure(ValueError("x" * 300), [tmp_path])
    assert (kind, len(reason)) == ("raised", REASON_CHARS)


def test_numbers_of_numpy_are_numbers_wherever_they_stand() -> None:
    answer = [
        *(np.float32(0.5), np.int64(2), np.bool_(True), np.array(0.25), np.array([1.0, 2.0])),
        *((np.float32(0.5), {"n": np.int64(3)}), {"k~0.0": np.array([0.5])}),
    ]
    plain = to_builtins(answer)
    assert plain == [0.5, 2, True, 0.25, [1.0, 2.0], [0.5, {"n": 3}], {"k~0.0": 0.5}]
    assert json.loads(json.dumps(plain)) == plain

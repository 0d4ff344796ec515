"""Records with hostile values: any float, any text, any size that a record can hold.

A member of a group is written as an agent, a gateway and people write it, and some fields of its
records have other values. Ids are left alone, so the records reach the code behind the first check.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from support.feed import reward, session, step

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import new_event_id
from clawstream.schemas.records import Assessment, Curation, FailedCall, Finding, Tag, VersionSpan
from clawstream.schemas.tokens import pack_ids, pack_logprobs

T = TypeVar("T")
FLOATS = (
    float("nan"), float("inf"), -float("inf"), sys.float_info.max, -sys.float_info.max, 1e308,
    5e-324, -0.0, 1e6, 1000001.0, -1e6, 0.5, 1e16, 3.5e38,
)  # fmt: skip
INTS = (0, -1, 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 10**15)
TEXTS = (
    "", "\x00", " ", "x" * 201, "y" * 100_000, "\U0001f600" * 300, "../../etc/passwd", "r/5.2",
    "hostile/7.99", "hostile/999999999999999999.0", "\u202eabc", "{" * 3000, "<think>" * 500, "NaN",
    "a~b.0", "';--", "\ufffe",
)  # fmt: skip
JSON = (
    b"", b"{", b"null", b"[]", b"{}", b"NaN", b"\xff\xfe", b"[" * 3000 + b"]" * 3000,
    b'{"a":' * 900 + b"1" + b"}" * 900, b'"\\ud800"', b'{"content":"\\ud800"}',
    b'{"content":1e400}',
    b'{"messages":' + b"[" * 300 + b"]" * 300 + b"}", b'{"a":' + b"9" * 5000 + b"}",
    b'{"content":"' + b"w " * 200_000 + b'"}', b'{"role":"assistant","content":[[[{}]]]}',
    b'{"content":"<think>' + b"</think><think>" * 2000 + b'"}',
    b'{"content":null,"tool_calls":[1]}',
    b'{"messages":[{"role":"assistant"},{"role":"assistant","tool_calls":[{"id":5}]},7]}',
    b'{"input":[{"type":"reasoning"},{"type":"message","content":{"a":1}}]}',
    b'{"output":[{"type":"function_call","arguments":"{"},null]}',
    b'{"environment":["x"],"gold":NaN}', b'{"environment":"e"}',
)  # fmt: skip
TOKENS = (
    b"", b"\x00", b"\xff" * 8, pack_ids([2**31 - 1, 0]), pack_ids([-1, -5]), b"\x01" * 40_000,
    pack_logprobs([float("nan"), -1.0]), pack_logprobs([float("-inf"), float("inf")]),
    pack_logprobs([3.4e38, -3.4e38]), pack_logprobs([-3.0]), pack_logprobs([5.0, 0.0]),
)  # fmt: skip
KEPT = {
    *("run_id", "trajectory_key", "trajectory_id", "step_id", "call_id", "event_id", "kind"),
    *("group_id", "group_size", "channel", "round", "blobs", "takes_back"),
}
"""Fields that stay, but for one record in ten."""


class Hostile:
    """Makes the records of one member after another."""

    def __init__(self, seed: int, run: str) -> None:
        self._rng, self._run = random.Random(seed), run

    def member(self, group: str, number: int, size: int) -> list[Any]:
        """Return the records of one member: some good, some with hostile values."""
        rng, run, key = self._rng, self._run, f"{group}-{number}"
        said = step(run, key)
        made: list[Any] = [session(run, key, "opened", group_id=group, group_size=size), said]
        for _ in range(rng.randrange(3)):
            made.append(step(run, key))
        made.append(reward(run, key, rng.choice(FLOATS)))
        more = rng.choice(("env", "human", "judge"))
        made.append(
            dataclasses.replace(reward(run, key, rng.choice(FLOATS)), source=more, name="x")
        )
        made.append(dataclasses.replace(reward(run, key, rng.choice(FLOATS)), step_id=said.step_id))
        made.append(
            Curation(
                event_id=new_event_id(), run_id=run, trajectory_key=key, tags=("t",), by="p",
                quality=rng.choice(FLOATS), created_at=0,
            )
        )  # fmt: skip
        made.append(
            Assessment(
                event_id=new_event_id(), run_id=run, trajectory_key=key, trajectory_id=key,
                rules=("r@1",), step_quality=(1.0,), created_at=0, assessment_revision=1,
                findings=(Finding(rule="r@1", score=0.5),), quality=rng.choice((0.5, 1.0, None)),
            )
        )  # fmt: skip
        made.append(
            FailedCall(
                event_id=new_event_id(), run_id=run, trajectory_key=key, protocol="openai.chat",
                streamed=False, source="engine", status=500, message="m", gateway_id="g",
                received_at=0, duration_ms=1.0,
            )
        )  # fmt: skip
        ends = {f"n{i}": rng.choice(FLOATS) for i in range(rng.randrange(3))}
        end = session(run, key, "completed", rewards=ends or None)
        made = [self._mutated(one) if rng.random() < 0.4 else one for one in made]
        return [*made, end]

    def _mutated(self, record: T) -> T:
        rng, hints = self._rng, typing.get_type_hints(type(record))
        names = [f.name for f in dataclasses.fields(record)]  # type: ignore[arg-type]
        if rng.random() < 0.9:
            names = [name for name in names if name not in KEPT]
        new = {
            n: self.value(n, hints[n])
            for n in rng.sample(names, min(len(names), rng.choice((1, 1, 2, 4))))
        }
        return dataclasses.replace(record, **new)  # type: ignore[type-var]

    def value(self, name: str, hint: Any) -> Any:
        """Return a hostile value of a field."""
        rng = self._rng
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Literal:
            return rng.choice(inside)
        if origin in (typing.Union, types.UnionType):
            one = rng.choice(inside)
            return None if one is type(None) else self.value(name, one)
        if origin is tuple:
            return tuple(self.value(name, inside[0]) for _ in range(rng.choice((0, 1, 3, 60))))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {rng.choice(TEXTS): self.value(name, inside[1]) for _ in range(3)}
        if hint in (VersionSpan, Tag) or dataclasses.is_dataclass(hint):
            fields = typing.get_type_hints(hint)
            return hint(**{n: self.value(n, h) for n, h in fields.items()})
        if hint is bytes:
            return rng.choice(JSON if name.endswith("_json") else TOKENS)
        choices: Mapping[type, Sequence[Any]] = {
            float: FLOATS, int: INTS, str: TEXTS, bool: (True, False),
        }  # fmt: skip
        return rng.choice(choices[hint])


def recordable(codec: Codec, event: Any) -> bool:
    """Return whether a record can hold its values at all."""
    try:
        codec.encode(event)
    except (ValueError, OverflowError):
        return False
    return True

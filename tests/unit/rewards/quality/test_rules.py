"""Built-in quality rules: a trajectory in, scores out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.rewards.quality.length import LONGEST, MOST_STEPS
from clawstream.rewards.quality.registry import BUILT_IN
from clawstream.rewards.quality.repetition import longest_loop
from clawstream.rewards.quality.score import Score
from clawstream.schemas.records import Segment, Trajectory, TrajectoryStep
from clawstream.schemas.tokens import pack_ids, pack_logprobs

FINE = list(range(100, 130))


def step(
    index: int = 0, ids: Sequence[int] | None = FINE, reply: Any = None, **more: Any
) -> dict[str, Any]:
    """Fields of a step, and its sampled tokens as `ids`; None: unknown."""
    given: dict[str, Any] = {
        "step_id": f"k~C{index}.0",
        "index": index,
        "parent": index - 1 if index else None,
        "status": "ok",
        "finish_reason": "stop",
        "drift": "clean" if index else "root",
        "prompt_tokens": 1,
        "response_tokens": len(ids or ()),
        "response_json": orjson.dumps(
            reply if reply is not None else {"role": "assistant", "content": "Well said."}
        ),
        "trainable": True,
        "offset": index,
    }
    return {"ids": ids, **given, **more}


def trajectory(*steps: dict[str, Any]) -> Trajectory:
    segments, made = [Segment(token_ids=pack_ids([1]))], []
    for fields in steps:
        ids, logprobs = fields.pop("ids"), fields.pop("logprobs", True)
        if ids is not None:
            fields.setdefault("segment", len(segments))
            packed = pack_logprobs([-0.5] * len(ids)) if logprobs else None
            segments.append(
                Segment(
                    parent=0, step_index=fields["index"], token_ids=pack_ids(ids), logprobs=packed
                )
            )
        made.append(TrajectoryStep(**fields))
    return Trajectory(
        run_id="r",
        trajectory_key="k",
        trajectory_id="k",
        group_id="g",
        channel="train",
        outcome="completed",
        opened_at=0,
        closed_at=1,
        part=0,
        parts=1,
        segments=tuple(segments),
        steps=tuple(made),
    )


def scores(name: str, *steps: dict[str, Any]) -> list[tuple[float, int | None]]:
    """Value and step index of what a rule found; each says what it saw."""
    found = BUILT_IN[name](trajectory(*steps))
    assert not isinstance(found, float | int | dict) and found is not None
    index = {f"k~C{i}.0": i for i in range(1000)}
    out = list(found)
    assert all(isinstance(s, Score) and s.evidence for s in out)
    return [(s.value, index[s.step] if s.step else None) for s in out]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_faultless_trajectory_has_no_finding(name: str) -> None:
    assert scores(name, step(0), step(1, range(200)), step(2, range(7, 900))) == []
    assert scores(name) == []


def test_length() -> None:
    long = step(0, response_tokens=4 * LONGEST)
    assert scores("length", long, step(1, [2]), step(2, [])) == [(0.25, 0), (0.5, 1), (0.0, 2)]
    assert scores("length", *(step(i) for i in range(2 * MOST_STEPS))) == [(0.5, None)]
    text = {"content": "x" * 8 * LONGEST}
    ((value, at),) = scores("length", step(0, None, text))
    assert at == 0 and 0.49 < value < 0.51, "without tokens its bytes are counted"
    assert scores("length", step(0, None, {"content": "x"})) == []


@pytest.mark.parametrize("status", ["aborted", "error"])
def test_truncation(status: Any) -> None:
    cut = [
        step(i, finish_reason=r)
        for i, r in enumerate(("stop", "tool_calls", "length", "abort", "content_filter", None))
    ]
    assert scores("truncation", *cut, step(6, status=status)) == [
        (0.0, 2),
        (0.0, 3),
        (0.0, 4),
        (0.0, 6),
    ]


def test_loops_of_tokens() -> None:
    fine = list(range(1000, 1256))
    assert scores("repetition", step(0, fine), step(1, fine[:80] + fine[:80])) == [], (
        "twice is no loop"
    )
    for period in (1, 2, 3, 7, 20, 50):
        looping = fine[:56] + (fine[:period] * 200)[:200]
        ((value, at),) = scores("repetition", step(0, looping))
        assert at == 0 and 56 / 256 - 0.001 <= value < 0.45, (period, value)
    in_the_middle = fine[:40] + [7, 8, 9] * 60 + fine[40:76]
    ((value, _),) = scores("repetition", step(0, in_the_middle))
    assert 0.25 < value < 0.35


def test_loops_of_text_where_there_are_no_tokens() -> None:
    good = " ".join(map(str, range(400)))
    assert scores("repetition", step(0, None, {"content": good})) == []
    for reply in (
        {"content": good[:200] + "I will try again. " * 100},
        {"content": [{"type": "text", "text": good[:200] + "I will try again. " * 100}]},
        {
            "output": [
                {"type": "message", "content": [{"type": "output_text", "text": "again " * 200}]}
            ]
        },
    ):
        ((value, at),) = scores("repetition", step(0, None, reply))
        assert at == 0 and value < 0.3


def test_the_same_reply_again_and_again() -> None:
    assert scores("repetition", *(step(i) for i in range(2))) == [], "once more is a poll"
    assert scores("repetition", *(step(i) for i in range(5))) == [
        (1 / 2, 2),
        (1 / 3, 3),
        (1 / 4, 4),
    ]
    siblings = [step(i, parent=None) for i in range(5)]
    assert scores("repetition", *siblings) == [], "equal replies of branches are rollouts"
    assert scores("repetition", *(step(i, [5, 6]) for i in range(5))) == [], "short ones say little"


@given(st.lists(st.integers(0, 3), max_size=400), st.integers(1, 60))
def test_a_loop_is_never_longer_than_the_reply_and_what_is_found_is_one(
    ids: list[int], period: int
) -> None:
    data = pack_ids(ids)
    assert 0 <= longest_loop(data, 4) <= len(data)
    assert longest_loop(pack_ids(range(len(ids))), 4) == 0
    looping = pack_ids(list(range(period)) * (360 // period))
    assert longest_loop(looping, 4) > 0.5 * len(looping)


@pytest.mark.parametrize(
    ("value", "reply"),
    [
        (0.0, {"role": "assistant", "content": ""}),
        (0.0, {"content": None}),
        (0.0, {"content": " \n"}),
        (0.0, []),
        (0.0, {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":'}}]}),
        (0.0, {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}),
        (0.0, {"content": "x", "tool_calls": [{"function": {"name": "f"}}]}),
        (0.0, {"content": "x", "tool_calls": ["f"]}),
        (0.0, {"function_call": {"name": "f", "arguments": "oh"}}),
        (0.0, {"content": [{"type": "text", "text": " "}]}),
        (0.0, {"output": [{"type": "function_call", "name": "f", "arguments": "{"}]}),
        (0.0, {"output": []}),
        (0.5, {"content": "a\ufffdb"}),
        (0.5, {"content": [{"type": "text", "text": "a\ufffdb"}]}),
        (None, {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}),
        (None, {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}),
        (
            None,
            {
                "content": None,
                "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": "free"}}],
            },
        ),
        (None, {"function_call": {"name": "f", "arguments": "{}"}}),
        (None, {"content": "hi", "tool_calls": []}),
        (None, {"content": [{"type": "tool_use", "name": "f", "input": {}}]}),
        (None, {"content": [{"type": "text", "text": "x"}]}),
        (None, {"output": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
        (None, {"output": [{"type": "custom_tool_call", "name": "f", "input": "free"}]}),
        (
            None,
            {"output": [{"type": "message", "content": [{"type": "refusal", "refusal": "no"}]}]},
        ),
    ],
)
def test_format(value: float | None, reply: Any) -> None:
    assert scores("format", step(0, reply=reply)) == ([] if value is None else [(value, 0)])


def test_format_of_half_a_character_is_not_that_of_what_is_no_json() -> None:
    """Valid JSON, though it can't be written as UTF-8; in a call's arguments too, escaped once or
    twice.
    """
    call = b'{"tool_calls":[{"function":{"name":"f","arguments":"%s"}}]}'
    fine = [
        b'{"content":"\\ud83d"}',
        call % b'{\\"a\\":\\"\\ud83d\\"}',
        call % b'{\\"a\\":\\"\\\\ud83d\\"}',
    ]
    assert scores("format", *(step(i, response_json=said) for i, said in enumerate(fine))) == []
    bad = [b'{"content":NaN}', call % b'{\\"a\\":\\ud83d}', b"[" * 100_000]
    assert scores("format", *(step(i, response_json=said) for i, said in enumerate(bad))) == [
        (0.0, 0),
        (0.0, 1),
        (0.0, 2),
    ]


def test_format_of_what_is_no_json_and_of_what_was_cut() -> None:
    assert scores("format", step(0, response_json=b"{")) == [(0.0, 0)]
    assert (
        scores("format", step(0, response_json=b"{", status="aborted"), step(1, response_json=b""))
        == []
    )


json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text(max_size=5)
    | st.sampled_from(["function_call", "tool_use", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "content",
                    "output",
                    "type",
                    "text",
                    "tool_calls",
                    "function_call",
                    "function",
                    "arguments",
                    "name",
                    "input",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json)
def test_no_shape_of_a_reply_stops_a_rule(reply: Any) -> None:
    for name, rule in BUILT_IN.items():
        said = rule(trajectory(step(0, reply=reply), step(1, None, reply)))
        assert not isinstance(said, float | int) and said is not None
        assert all(isinstance(s, Score) and 0 <= s.value <= 1 for s in said), name


def test_tokens() -> None:
    steps = [
        step(0),
        step(1, logprobs=False),
        step(2, None, untrainable_reason="text only"),
        step(3, None, marks=("retried",)),
    ]
    assert scores("tokens", *steps) == [(0.0, 1), (0.0, 2)]
    found = list(BUILT_IN["tokens"](trajectory(step(0, None, untrainable_reason="text only"))))  # type: ignore[arg-type]
    assert found[0].evidence == "text only"  # type: ignore[union-attr]


def test_drift_and_retries() -> None:
    drifts = [step(i, drift=d) for i, d in enumerate(("root", "clean", "realigned", "forked"))]
    assert scores("drift", *drifts) == [(0.8, 2), (0.5, 3)]
    assert scores("retried", step(0), step(1, None, marks=("retried",))) == [(0.0, 1)]

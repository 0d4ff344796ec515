"""Test records as a person edits them.

Every record survives the round trip, unedited bytes stay equal, and an error names its field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from fastavro.utils import generate_one

from clawstream.schemas.codec import foreign
from clawstream.schemas.codec.record_json import changed, from_json, to_json
from clawstream.schemas.codec.single_object import TOP_LEVEL, Codec, record_from, shipped
from clawstream.schemas.errors import NotARecord
from clawstream.schemas.records import Reward, Step, VersionSpan
from clawstream.schemas.tokens import pack_ids, pack_logprobs

CODEC = Codec()
STEP = Step(
    step_id="k~1.0",
    run_id="r",
    trajectory_key="k",
    call_id="k~1",
    choice_index=0,
    protocol="p",
    model="m",
    status="ok",
    streamed=False,
    request_json=b'{"a":  1.0,"n":123456789012345678901234567890}',
    response_json=b"no json",
    gateway_id="g",
    prompt_token_ids=pack_ids([1, 2]),
    response_token_ids=b"odd",
    response_logprobs=pack_logprobs([-0.1, float("-inf")]),
    versions=(VersionSpan(version="r/0.0", start=0, end=1),),
    received_at=1,
    finished_at=2,
)
REWARD = Reward(
    event_id="e",
    run_id="r",
    trajectory_key="k",
    source="env",
    name="n",
    function_version="1",
    value=math.nan,
    reward_revision=0,
    created_at=1,
)


@pytest.mark.slow
@pytest.mark.parametrize("cls", TOP_LEVEL)
def test_there_and_back(cls: type) -> None:
    for _ in range(4):
        record = record_from(cls.__name__, generate_one(foreign.parse(shipped(cls.__name__))))
        said = json.loads(json.dumps(to_json(record), allow_nan=False))
        assert CODEC.encode(from_json(CODEC, cls.__name__, said, record)) == CODEC.encode(record)
        again = from_json(CODEC, cls.__name__, said)
        assert json.dumps(to_json(again)) == json.dumps(said)


def test_what_is_shown() -> None:
    said = to_json(STEP)
    assert said["prompt_token_ids"] == [1, 2] and said["response_token_ids"] == {"base64": "b2Rk"}
    assert said["response_logprobs"] == {"base64": "zczMvQAAgP8="} and said["response_json"] == {
        "base64": "bm8ganNvbg=="
    }
    assert (
        said["versions"] == [{"version": "r/0.0", "start": 0, "end": 1}]
        and said["request_json"]["a"] == 1.0
    )
    assert to_json(REWARD)["value"] == "NaN"
    assert from_json(CODEC, "Reward", to_json(REWARD) | {"value": "-Infinity"}).value == -math.inf


def test_only_what_is_changed_changes() -> None:
    made = from_json(
        CODEC,
        "Step",
        to_json(STEP) | {"response_token_ids": [7, 8], "response_json": {"b": 2}, "model": "x"},
        STEP,
    )
    assert made == dataclasses.replace(
        STEP, response_token_ids=pack_ids([7, 8]), response_json=b'{"b":2}', model="x"
    )
    whole = from_json(CODEC, "Step", changed(to_json(STEP), ["request_json=" + "1" * 30]), STEP)
    assert whole == dataclasses.replace(STEP, request_json=b"1" * 30)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"choice_index": "1"}, "choice_index: int was expected, not '1'"),
        ({"choice_index": 2**31}, "no Step: "),
        ({"choice_index": True}, "choice_index: int was expected, not True"),
        ({"streamed": 1}, "streamed: boolean was expected, not 1"),
        ({"status": "fine"}, "status: must be one of ok, aborted, error, not 'fine'"),
        ({"run_id": None}, "run_id: must not be null"),
        ({"nope": 1}, "nope: no field of Step; there are step_id, run_id,"),
        (
            {"versions": [{"version": "r/0.0", "start": 0}]},
            "versions.0.end: is missing, and has no default",
        ),
        ({"versions": {}}, "versions: a list was expected"),
        ({"versions": [3]}, "versions.0: an object was expected, not 3"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids: no list of whole numbers"),
        ({"response_logprobs": ["x"]}, "response_logprobs: no list of numbers"),
        ({"prompt_token_ids": {"base64": "!"}}, "prompt_token_ids: no base64"),
        ({"response_logprobs": [1e40]}, "response_logprobs: no list of numbers: "),
        ({"request_json": math.nan}, "request_json: no JSON: "),
        ({"request_json": {"a": [math.inf]}}, "request_json: no JSON: "),
        ({"request_json": "\ud800"}, "request_json: no JSON: "),
        ({"model": "\ud800"}, "no Step: "),
        ({"received_at": 10**30}, "no Step: "),
    ],
)  # fmt: skip
def test_a_mistake_names_its_field(change: dict[str, Any], why: str) -> None:
    with pytest.raises(NotARecord) as raised:
        from_json(CODEC, "Step", to_json(STEP) | change)
    assert why in str(raised.value)


def test_no_record() -> None:
    with pytest.raises(NotARecord, match=re.escape("there is no record '../Step'")):
        from_json(CODEC, "../Step", {})
    with pytest.raises(NotARecord, match="value: a number was expected"):
        from_json(CODEC, "Reward", to_json(REWARD) | {"value": "much"})
    with pytest.raises(NotARecord, match="value: int too large"):
        from_json(CODEC, "Reward", changed(to_json(REWARD), ["value=" + "1" * 400]))
    with pytest.raises(NotARecord, match="nested too deeply"):
        changed(to_json(REWARD), ["detail_json=" + "[" * 100_000])


def test_changes_by_path() -> None:
    said = changed(
        to_json(STEP),
        ["run_id=new", "versions.0.end=2", 'tags=[{"name":"t","evidence":"e"}]', "group_id=null"],
    )
    assert (said["run_id"], said["versions"][0]["end"], said["tags"], said["group_id"]) == (
        "new", 2, [{"name": "t", "evidence": "e"}], None,
    )  # fmt: skip
    assert to_json(STEP)["versions"][0]["end"] == 1
    for wrong in ("versions.5.end=1", "versions.x.end=1", "run_id.a=1", "nothing", "=3"):
        with pytest.raises(NotARecord):
            changed(to_json(STEP), [wrong])

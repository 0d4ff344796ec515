"""Test records as a person reads them."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from fastavro.utils import generate_one

from clawstream.schemas.codec import foreign
from clawstream.schemas.codec.record_json import to_json
from clawstream.schemas.codec.single_object import TOP_LEVEL, as_dict, record_from, shipped
from clawstream.schemas.records import Reward, Segment, Step, Trajectory, VersionSpan
from clawstream.schemas.tokens import pack_ids, pack_logprobs

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
TRAJECTORY = Trajectory(
    run_id="r",
    trajectory_key="k",
    trajectory_id="k",
    group_id="g",
    channel="train",
    outcome="completed",
    opened_at=1,
    closed_at=2,
    part=0,
    parts=1,
    segments=(),
    steps=(),
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
def test_every_record_is_valid_json(cls: type) -> None:
    for _ in range(4):
        record = record_from(cls.__name__, generate_one(foreign.parse(shipped(cls.__name__))))
        said = to_json(record)
        assert json.loads(json.dumps(said, allow_nan=False)) == said
        assert said.keys() == as_dict(record).keys()


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
    segments = (Segment(token_ids=pack_ids([3]), logprobs=pack_logprobs([-0.5])),)
    shown = to_json(dataclasses.replace(TRAJECTORY, segments=segments))["segments"]
    assert [(s["token_ids"], s["logprobs"]) for s in shown] == [([3], [-0.5])]
    assert to_json(REWARD)["value"] == "NaN"
    lowest = dataclasses.replace(REWARD, value=-math.inf)
    assert to_json(lowest)["value"] == "-Infinity"

"""Whether a step can be trained, and its temperature: redacted tokens, sampling settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clawstream.schemas.records import Sampling, Step, TokenSpan
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.stream_jobs.assemble.payload.trainability import trainability

NAN = float("nan")


def step(logprobs: list[float], *spans: tuple[int, int]) -> Step:
    return Step(
        step_id="t~1.0", run_id="r", trajectory_key="t", call_id="t~1", choice_index=0,
        protocol="openai_chat", model="m", status="ok", streamed=False, request_json=b"{}",
        response_json=b"{}", gateway_id="g", received_at=1, finished_at=2,
        prompt_token_ids=pack_ids([1]), response_token_ids=pack_ids([2] * len(logprobs)),
        response_logprobs=pack_logprobs(logprobs), version_first="r/1.0",
        version_last="r/1.0", redacted_response=tuple(TokenSpan(start=a, end=b) for a, b in spans),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("logprobs", "spans", "reason"),
    [
        ([-1.0, NAN, NAN, -1.0], [(1, 3)], None),
        ([NAN, -1.0, NAN], [(0, 1), (2, 3)], None),
        ([NAN, NAN], [(0, 2)], "all sampled tokens were redacted"),
        ([NAN, NAN], [(0, 1)], "log-probabilities that are not finite"),
        ([-1.0, float("-inf"), NAN], [(2, 3)], "log-probabilities that are not finite"),
        ([-1.0, -1.0], [(0, 1)], "log-probabilities of redacted tokens"),
        ([-1.0, NAN], [(1, 3)], "log-probabilities of redacted tokens"),
    ],
)
def test_a_step_with_redacted_tokens(
    logprobs: list[float], spans: list[tuple[int, int]], reason: str | None
) -> None:
    assert trainability(step(logprobs, *spans)).reason == reason


def test_tokens_of_a_reply_that_could_not_be_read_are_not_trained() -> None:
    unread = replace(step([-1.0, -2.0]), tokens_absent_reason="unread reply: why")
    assert trainability(unread).reason == "unread reply: why"


def sampled(**how: Any) -> Step:
    """Return a step with the sampling settings of its engine.

    The defaults are temperature 1 and the whole distribution; `how` overrides them.
    """
    plain: dict[str, Any] = {
        "source": "engine", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    return replace(step([-1.0, -2.0]), sampling=Sampling(**(plain | how)))


@pytest.mark.parametrize(
    ("how", "temperature"),
    [
        ({}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "logprobs_mode": "raw_logprobs"}, 1.0),
        ({"temperature": 0.0}, 1.0),  # greedy: vLLM then divides by 1
        ({"temperature": 0.0, "logprobs_mode": "raw_logprobs"}, 1.0),
        (
            {"temperature": 0.0, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
            1.0,
        ),  # truncation does not change greedy decoding
        ({"top_k": -1}, 1.0),
        ({"source": "request", "temperature": None, "top_p": None, "logprobs_mode": None}, None),
        ({"source": "request", "temperature": None, "logprobs_mode": "raw_logprobs"}, 1.0),
        ({"source": "request", "temperature": 1.0, "logprobs_mode": None}, 1.0),
    ],
)
def test_log_probabilities_are_of_a_temperature(
    how: dict[str, Any], temperature: float | None
) -> None:
    found = trainability(sampled(**how))
    assert (found.reason, found.logprobs_temperature) == (None, temperature)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"top_p": 0.9}, "sampled with top_p=0.9"),
        ({"top_k": 20}, "sampled with top_k=20"),
        ({"min_p": 0.05}, "sampled with min_p=0.05"),
        ({"presence_penalty": 0.5}, "sampled with presence_penalty=0.5"),
        ({"frequency_penalty": -0.5}, "sampled with frequency_penalty=-0.5"),
        ({"repetition_penalty": 1.1}, "sampled with repetition_penalty=1.1"),
        ({"constraints": ("json",)}, "sampled with json"),
        (
            {"top_p": 0.9, "top_k": 20, "constraints": ("json", "logit_bias")},
            "sampled with top_p=0.9, top_k=20, json, logit_bias",
        ),
        ({"temperature": 0.0, "presence_penalty": 0.5}, "sampled with presence_penalty=0.5"),
        ({"temperature": NAN}, "sampled with temperature=nan"),
        ({"temperature": -1.0}, "sampled with temperature=-1"),
        ({"temperature": 1e-30}, "sampled with temperature=1e-30"),
        ({"logprobs_mode": "raw_logits"}, "raw_logits instead of log-probabilities"),
        (
            {"source": "request", "temperature": 0.7, "logprobs_mode": None},
            "log-probabilities of an unknown temperature",
        ),
    ],
)  # fmt: skip
def test_what_was_not_sampled_from_the_whole_distribution_is_not_trained(
    how: dict[str, Any], reason: str
) -> None:
    assert trainability(sampled(**how)).reason == reason


def test_a_setting_trains_truncated_sampling_too() -> None:
    assert trainability(sampled(temperature=0.7, top_p=0.9), truncated=True)[-2:] == (None, 0.7)
    assert trainability(sampled(logprobs_mode="raw_logits"), truncated=True).reason is not None


def test_a_step_that_does_not_say_how_it_was_sampled_has_no_temperature() -> None:
    assert trainability(step([-1.0]))[-2:] == (None, None)

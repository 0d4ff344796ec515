"""Records that assemble rejects, and records that it accepts without training them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.assemble import (
    LIMITS,
    InMemoryPartition,
    curation,
    failed_call,
    reward,
    session,
    step,
)

from clawstream.schemas.records import Sampling, Tag, VersionSpan
from clawstream.schemas.tokens import pack_logprobs
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, SourceTopic

LARGE = bytes(9 << 20)


@pytest.mark.parametrize(
    ("source", "event"),
    [
        (STEPS, step("k", 0, step_id=f"k~{'C' * 201}.0")),
        (STEPS, step("k", 0, finish_reason="x" * 201)),
        (STEPS, step("k", 0, version_last="x" * 201)),
        (STEPS, step("k", 0, versions=(VersionSpan(version="x" * 201, start=0, end=1),))),
        (STEPS, step("k", 0, tags=(Tag(name="x" * 201, evidence=""),))),
        (STEPS, step("k", 0, tags=(Tag(name="x", evidence="y" * (9 << 18)),) * 2)),
        (STEPS, step("k", 0, response_json=LARGE)),
        (STEPS, step("k", 0, prompt_token_ids=LARGE)),
        (STEPS, session("k", "opened", metadata_json=LARGE + b" ")),
        (REWARDS, reward("k", name="x" * 201)),
        (REWARDS, curation("k", "c", tags=("x" * 201,))),
        (REWARDS, curation("k", "c", tags=("x",) * 51)),
    ],
    ids=lambda v: "",
)
def test_what_would_make_our_own_records_too_large_is_dead_lettered(
    source: SourceTopic, event: Any
) -> None:
    w = InMemoryPartition().feed((source, 0, event))
    assert [(b.source, b.reason) for b in w.dead_letters] == [
        (source, "invalid")
    ] and not w.state.opened


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"status": "aborted"}, "status aborted"),
        ({"response_logprobs": None, "tokens_absent_reason": "no logprobs"}, "no logprobs"),
        ({"response_logprobs": pack_logprobs([-1, -1])}, "2 log-probabilities for 1 tokens"),
        ({"version_last": "r/4.0"}, "version not certain"),
        ({"version_first": None, "version_last": None}, "version not certain"),
        (
            {"version_first": "default", "version_last": "default"},
            "sampled by an engine without a version of ours",
        ),
        (
            {"version_first": "q/3.0", "version_last": "q/3.0"},
            "sampled by version q/3.0 of another run",
        ),
        ({"response_token_ids": b"", "response_logprobs": b""}, "no sampled tokens"),
        (
            {"response_logprobs": pack_logprobs([float("nan")])},
            "log-probabilities that are not finite",
        ),
        ({"response_logprobs": pack_logprobs([0.5])}, "log-probabilities above 0"),
        (
            {"response_logprobs": pack_logprobs([float("-inf")])},
            "log-probabilities that are not finite",
        ),
    ],
)
def test_untrainable_steps_say_why(more: dict[str, Any], reason: str) -> None:
    w = InMemoryPartition().feed(
        (STEPS, 0, step("k", 0, **more)), (STEPS, 1, session("k", "completed"))
    )
    assert w.trajectories["k"].steps[0].untrainable_reason == reason
    c = w.last("k")
    assert (c.trainable, c.oldest_sync_index, c.trainable_tokens) == (False, None, 0)


def test_each_step_of_a_trajectory_keeps_the_temperature_of_its_log_probabilities() -> None:
    def how(temperature: float, **more: Any) -> Sampling:
        return Sampling(
            source="engine", temperature=temperature, logprobs_mode="processed_logprobs", **more
        )

    def trained(w: InMemoryPartition) -> list[tuple[float | None, bool, str | None]]:
        steps = [
            step("k", 0, sampling=how(0.7)),
            step("k", 1, (1, 2, 3), sampling=how(0.3, top_p=0.9)),
            step("k", 2, (7,)),
        ]
        w.feed(*((STEPS, 0, s) for s in steps), (STEPS, 1, session("k", "completed")))
        found = w.trajectories["k"].steps
        assert [s.trainable for s in w.last("k").steps] == [s.trainable for s in found]
        return [(s.logprobs_temperature, s.trainable, s.untrainable_reason) for s in found]

    assert trained(InMemoryPartition()) == [
        (0.7, True, None),
        (0.3, False, "sampled with top_p=0.9"),
        (None, True, None),
    ]
    assert trained(InMemoryPartition(replace(LIMITS, train_truncated=True)))[1] == (0.3, True, None)


def test_each_step_of_a_trajectory_keeps_the_fingerprint_of_its_tokenizer() -> None:
    w = InMemoryPartition().feed(
        (STEPS, 0, step("k", 0, tokenizer_fingerprint="f00d")),
        (STEPS, 0, step("k", 1, (1, 2, 3))),
        (STEPS, 0, step("k", 2, (1, 2, 3), tokenizer_fingerprint="f" * 201)),
        (STEPS, 1, session("k", "completed")),
    )
    assert [s.tokenizer_fingerprint for s in w.trajectories["k"].steps] == ["f00d", None]
    assert len(w.dead_letters) == 1


def test_a_failed_call_folds_to_nothing() -> None:
    """A failed call only advances the time.

    It opens no trajectory, adds no step, prolongs no trajectory and is no dead letter.
    """
    w = InMemoryPartition().feed(
        (STEPS, 0, failed_call("k")), (STEPS, 0, failed_call(None, source="gateway", status=503))
    )
    assert (w.state.opened, w.dead_letters, w.payload) == ({}, [], {})
    w.feed(
        (STEPS, 0, step("k", 0)),
        (STEPS, 900, failed_call("k", 1)),
        (STEPS, 1001, failed_call("other")),
    )
    assert [s.step_id for s in w.trajectories["k"].steps] == ["k~C0.0"] and w.trajectories[
        "k"
    ].outcome == "timed_out"
    assert not w.state.opened and not w.dead_letters


def test_a_failed_call_among_rewards_is_a_dead_letter() -> None:
    w = InMemoryPartition().feed((REWARDS, 0, failed_call("k")))
    assert [(b.source, b.reason) for b in w.dead_letters] == [(REWARDS, "invalid")]

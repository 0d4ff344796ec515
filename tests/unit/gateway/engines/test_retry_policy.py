"""The truth table of retries."""

from __future__ import annotations

import pytest

from clawstream.gateway.engines.retry_policy import Outcome, outcome_of, pause_s, retries
from clawstream.gateway.protocols.base import EngineKind


@pytest.mark.parametrize(
    ("outcome", "alone", "another_free", "broke_before"),
    [
        ("unreachable", True, True, True),
        ("busy", True, True, True),
        ("busy_provider", False, True, False),
        ("limited", False, True, False),
        ("broken", True, True, False),
        ("failed", False, False, False),
        ("replied", False, False, False),
    ],
)
def test_which_outcomes_are_retried(
    outcome: Outcome, alone: bool, another_free: bool, broke_before: bool
) -> None:
    assert retries(outcome) is alone
    assert retries(outcome, another_free=True) is another_free
    assert retries(outcome, broke_before=True) is broke_before


@pytest.mark.parametrize(
    ("status", "kind", "outcome"),
    [
        (200, "vllm", "replied"),
        (500, "vllm", "replied"),
        (504, "text", "replied"),
        (502, "captured", "busy"),
        (503, "vllm", "busy"),
        (503, "text", "busy_provider"),
        (429, "vllm", "limited"),
        (529, "text", "limited"),
    ],
)
def test_what_a_status_means(status: int, kind: EngineKind, outcome: Outcome) -> None:
    assert outcome_of(status, kind) == outcome


def test_pauses_grow_and_stay() -> None:
    assert [pause_s(rounds) for rounds in (1, 2, 5, 99)] == [0.05, 0.1, 0.8, 0.8]

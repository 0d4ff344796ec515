"""Whether a step can be trained when tokens of it were redacted: all but them."""

from __future__ import annotations

import pytest

from schemas.events import Step, TokenSpan
from schemas.tokens import pack_ids, pack_logprobs
from stream_jobs.provenance import provenance

NAN = float("nan")


def step(logprobs: list[float], *spans: tuple[int, int]) -> Step:
    return Step(
        step_id="t~1.0", run_id="r", trajectory_key="t", call_id="t~1", choice_index=0, protocol="openai_chat", model="m", status="ok",
        streamed=False, request_json=b"{}", response_json=b"{}", gateway_id="g", received_at=1, finished_at=2, prompt_token_ids=pack_ids([1]),
        response_token_ids=pack_ids([2] * len(logprobs)), response_logprobs=pack_logprobs(logprobs), version_first="r/1.0",
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
def test_a_step_with_redacted_tokens(logprobs: list[float], spans: list[tuple[int, int]], reason: str | None) -> None:
    assert provenance(step(logprobs, *spans)).reason == reason

"""Decide which weight versions sampled a step's tokens, and whether it can be trained. Pure. The
only place that decides trainability.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

from clawstream.schemas import tokens
from clawstream.schemas.ids import Version, parse_version
from clawstream.schemas.records import Step, VersionSpan
from clawstream.stream_jobs.assemble.payload.sampling_mode import logprobs_temperature, why_unscored

REASON_CHARS = 200


class Trainability(NamedTuple):
    """Attributes:
    versions: Spans over all response tokens; empty if uncertain.
    oldest, newest: Version ids with the lowest and highest sync index, if known. A call
        without spans during a version change counts as its oldest.
    reason: Why the step cannot be trained; None if it can.
    logprobs_temperature: Temperature of the distribution of the log-probabilities; None if
        unknown.
    """

    versions: tuple[VersionSpan, ...]
    oldest: str | None
    newest: str | None
    reason: str | None
    logprobs_temperature: float | None


def trainability(step: Step, truncated: bool = False) -> Trainability:
    """Decide the trainability of a step. truncated: also train truncated distributions
    (`sampling_mode`). Raises ValueError if packed values are incomplete.
    """
    for name in ("prompt_token_ids", "response_token_ids", "response_logprobs"):
        if len(getattr(step, name) or b"") % 4:
            raise ValueError(
                f"{name}: {len(getattr(step, name))} bytes are no whole number of 4-byte values"
            )
    count = tokens.count(step.response_token_ids)
    spans = _certain_spans(step, count)
    labels = {s.version for s in spans} or {
        v for v in (step.version_first, step.version_last) if v is not None
    }
    known = sorted(
        (v for v in map(parse_version, labels) if v is not None),
        key=lambda v: (v.sync_index, v.attempt),
    )
    oldest = str(known[0]) if known else None
    reason = _why_not(step, count, spans, known, labels) or why_unscored(step.sampling, truncated)
    return Trainability(
        versions=spans,
        oldest=oldest,
        newest=str(known[-1]) if len(known) > 1 else oldest,
        reason=reason[:REASON_CHARS] if reason else None,
        logprobs_temperature=logprobs_temperature(step.sampling),
    )


def _certain_spans(step: Step, count: int) -> tuple[VersionSpan, ...]:
    """Return spans that cover the response without gaps; otherwise an empty tuple."""
    if step.versions:
        at = 0
        for span in step.versions:
            if span.start != at or span.end <= span.start:
                return ()
            at = span.end
        return step.versions if at == count else ()
    if step.version_first is not None and step.version_first == step.version_last and count:
        return (VersionSpan(version=step.version_first, start=0, end=count),)
    return ()


def _why_not(
    step: Step,
    count: int,
    spans: tuple[VersionSpan, ...],
    known: list[Version],
    labels: Collection[str],
) -> str | None:
    if step.status != "ok":
        return f"status {step.status}"
    if (
        step.prompt_token_ids is None
        or step.response_token_ids is None
        or step.response_logprobs is None
    ):
        return step.tokens_absent_reason or "no token ids or log-probabilities"
    if step.tokens_absent_reason is not None:
        return step.tokens_absent_reason  # tokens of a reply that could not be read
    if count == 0:
        return "no sampled tokens"
    if tokens.count(step.response_logprobs) != count:
        return f"{tokens.count(step.response_logprobs)} log-probabilities for {count} tokens"
    if step.redacted_response:
        logprobs = tokens.unpack_logprobs(step.response_logprobs)
        redacted = {i for span in step.redacted_response for i in range(span.start, span.end)}
        if any(i >= count or not math.isnan(logprobs[i]) for i in redacted):
            return "log-probabilities of redacted tokens"  # NaN means: do not train
        if len(redacted) == count:
            return "all sampled tokens were redacted"
        sampled: Sequence[float] = [p for i, p in enumerate(logprobs) if i not in redacted]
    else:
        sampled = array(
            "f", step.response_logprobs
        )  # twice as fast; the byte order of this machine
    if not math.isfinite(sum(sampled)):
        return "log-probabilities that are not finite"  # would spoil the batch
    if max(sampled) > 0:
        return "log-probabilities above 0"
    if not spans:
        return "version not certain"
    if len({str(v) for v in known}) != len(labels):
        return "sampled by an engine without a version of ours"
    foreign = next((v for v in known if v.run_id != step.run_id), None)
    return f"sampled by version {foreign} of another run" if foreign else None

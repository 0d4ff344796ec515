"""Client retries: the same call twice in one trajectory, and which of the two counts. Pure.

Two steps are attempts at one choice when
- they have the same idempotency key and choice index, and prompts of equal length if both are
  known; or
- one is incomplete (aborted by the client, or an error), and a later call has the identical
  prompt; or
- the client declares a retry (`x-stainless-retry-count` above 0), and an earlier step has the
  identical prompt.
Prompts are identical when their token ids are equal; without token ids, when the parts of the
requests that make the prompt are equal as JSON: clients order keys otherwise when they try again,
or stream no more. Equal prompts alone are separate rollouts. Choices of one call are never retries
of each other.

The attempt that the client continued counts; else the complete one; else the later one. The
other is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from clawstream.schemas.conversation import RecordedRequest
from clawstream.schemas.records import Step
from clawstream.stream_jobs.assemble.matching.conversation import prompt_of
from clawstream.stream_jobs.assemble.matching.token_prefix import hash_of
from clawstream.stream_jobs.assemble.state.steps import OpenStep, OpenSteps, call_suffix


class Retry(NamedTuple):
    """Positions of the step that is never trained, and of the step that counts."""

    replaced: int
    counted: int


def idempotency_hash(step: Step) -> int | None:
    """Return the hash of idempotency key and choice index; None without a key."""
    if not step.idempotency_key:
        return None
    return hash_of(
        b"idempotency\x1f", str(step.choice_index).encode(), b"\x1f", step.idempotency_key.encode()
    )


def request_hash(request: RecordedRequest) -> int:
    """Return the `prompt_hash` of a step without token ids."""
    return hash_of(b"request\x1f", prompt_of(request))


def may_be_equal(prompt: int, other: int) -> bool:
    """Return whether two prompts may be equal, by length; 0 is unknown. Some clients reuse one
    idempotency key for all calls.
    """
    return 0 in (prompt, other) or prompt == other


def ended_badly(entry: OpenStep) -> bool:
    """Return whether the client received no complete answer, so that a retry is expected."""
    return entry.status != "ok"


def retry_of(
    steps: OpenSteps, entry: OpenStep, step: Step, request: RecordedRequest
) -> Retry | None:
    """Return the retry if the next step repeats an earlier one."""
    new = len(steps)
    old = _retried_step(steps, entry, step, request)
    if old is None:
        return None
    if _continued(steps, old, entry) or (ended_badly(entry) and not ended_badly(steps[old])):
        return Retry(new, old)
    return Retry(old, new)


def undo_retry(steps: OpenSteps, at: int) -> Retry | None:
    """Undo a retry when the client continues from the replaced step `at`."""
    other = steps[at].retried
    if (
        other is None
        or ended_badly(steps[at])
        or steps[other].retried is not None
        or steps.continued[other]
    ):
        return None
    return Retry(other, at)


def why_retried(steps: Sequence[OpenStep], at: int) -> str:
    """Return the evidence for the mark on step `at`."""
    step, other = steps[at], steps[steps[at].retried or 0]
    if step.idempotency_hash is not None and step.idempotency_hash == other.idempotency_hash:
        how = "same idempotency key"
    elif ended_badly(step):
        how = f"{step.status}, then asked again"
    else:
        how = "the client said that it tried again"
    return f"retried as {other.step_suffix}: {how}"


def _retried_step(
    steps: OpenSteps, entry: OpenStep, step: Step, request: RecordedRequest
) -> int | None:
    """Return the latest earlier step that the next one repeats."""
    call = call_suffix(entry.step_suffix)

    def may_be(at: int) -> bool:
        other = steps[at]
        return (
            other.retried is None
            and other.choice == entry.choice
            and call_suffix(other.step_suffix) != call
        )

    for i in reversed(
        steps.keyed.get(entry.idempotency_hash, ()) if entry.idempotency_hash is not None else ()
    ):
        if may_be_equal(steps[i].prompt, entry.prompt) and may_be(i):
            return i
    identical = list(steps.failed.get(entry.prompt_hash, ()))
    if steps.failed_untokenized:
        identical += steps.failed_untokenized.get(request_hash(request), ())
    found = max(filter(may_be, identical), default=None)
    if (step.retry_count or 0) > 0:
        body = request_hash(request)
        for i in range(len(steps) - 1, -1 if found is None else found, -1):
            wanted = entry.prompt_hash if steps[i].end_hash is not None else body
            if steps[i].prompt_hash == wanted and may_be(i) and not _continued(steps, i, entry):
                return i
    return found


def _continued(steps: OpenSteps, at: int, entry: OpenStep) -> bool:
    """Return whether a step is continued, by an earlier step or by the next one."""
    return bool(steps.continued[at]) or at in (entry.base, entry.after)

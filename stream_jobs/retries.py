"""Client retries: the same call twice in one trajectory, and which of the two counts. Pure.

Two steps are one choice, asked for twice, when
- they have the same idempotency key and the same choice index, and prompts of the same length if both are known; or
- one ended badly (aborted by the client, or an error), and a call with the identical prompt came after it; or
- the client says that it tries again (`x-stainless-retry-count` above 0), and an earlier step has the identical prompt.
Prompts are identical when their token ids are; without token ids, when the requests are, byte for byte. Equal prompts alone are
rollouts: the same question asked several times on purpose. Choices of one call are never retries of each other.

Of the two counts the one that the client went on from; else the one that did not end badly; else the later one. The other is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schemas.events import Step
from stream_jobs.index import StepEntry
from stream_jobs.prefix import hash_of


class Retry(NamedTuple):
    """Positions of the step that is never trained, and of the one that counts."""

    gone: int
    counts: int


def idempotency_hash(step: Step) -> int | None:
    """Of its idempotency key and choice. None: it has no key."""
    if not step.idempotency_key:
        return None
    return hash_of(b"idempotency\x1f", str(step.choice_index).encode(), b"\x1f", step.idempotency_key.encode())


def request_hash(step: Step) -> int:
    """What `asked` is when the token ids of the prompt are not known."""
    return hash_of(b"request\x1f", step.request_json)


def as_long(prompt: int, other: int) -> bool:
    """Whether two prompts may be the same, by their tokens; 0 is not known. Some clients send one idempotency key with every call."""
    return 0 in (prompt, other) or prompt == other


def ended_badly(entry: StepEntry) -> bool:
    """Whether the client has no whole answer from this step: asking again is what it would do."""
    return entry.status != "ok"


def retry_of(steps: Sequence[StepEntry], new: int, step: Step) -> Retry | None:
    """Whether the step at `new`, the last one, is an earlier one's retry."""
    entry = steps[new]
    old = _twin(steps, new, step)
    if old is None:
        return None
    if _continued(steps, old) or (ended_badly(entry) and not ended_badly(steps[old])):
        return Retry(new, old)
    return Retry(old, new)


def mended(steps: Sequence[StepEntry], at: int) -> Retry | None:
    """The client goes on from step `at`, which was taken for the one that it did not get: then it is the other way round."""
    other = steps[at].retried
    if other is None or ended_badly(steps[at]) or steps[other].retried is not None or _continued(steps, other):
        return None
    return Retry(other, at)


def why_retried(steps: Sequence[StepEntry], at: int) -> str:
    """Evidence for the mark on step `at`."""
    step, other = steps[at], steps[steps[at].retried or 0]
    if step.idem is not None and step.idem == other.idem:
        how = "same idempotency key"
    elif ended_badly(step):
        how = f"{step.status}, then asked again"
    else:
        how = "the client said that it tried again"
    return f"retried as {other.tail}: {how}"


def _twin(steps: Sequence[StepEntry], new: int, step: Step) -> int | None:
    """The earlier step that the one at `new` asks for again."""
    entry, said_so = steps[new], (step.retry_count or 0) > 0
    suspects = [
        i for i, s in enumerate(steps[:new])
        if s.status != "ok" or said_so or (s.idem == entry.idem and s.idem is not None)
    ]  # fmt: skip
    call = entry.tail.rpartition(".")[0]
    suspects = [
        i for i in reversed(suspects)
        if steps[i].retried is None and steps[i].choice == entry.choice and steps[i].tail.rpartition(".")[0] != call
    ]  # fmt: skip
    for i in suspects:
        if entry.idem is not None and steps[i].idem == entry.idem and as_long(steps[i].prompt, entry.prompt):
            return i
    body = request_hash(step) if any(steps[i].end_hash is None for i in suspects) else None
    for i in suspects:
        identical = steps[i].asked == (entry.asked if steps[i].end_hash is not None else body)
        if identical and (ended_badly(steps[i]) or (said_so and not _continued(steps, i))):
            return i
    return None


def _continued(steps: Sequence[StepEntry], at: int) -> bool:
    return any(s.base == at or s.after == at for s in steps[at + 1 :])

"""The steps of an open trajectory, without payload. Pure; all times are log timestamps in ms."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from msgspec import Struct

from clawstream.schemas.records import StepStatus
from clawstream.stream_jobs.assemble.payload.segment_tree import TOKEN_BYTES

STEP_BYTES = 400
"""Upper bound for the size of a step without its tokens and its reply, bytes."""


def call_suffix(step_suffix: str) -> str:
    """Return the call part of a step suffix (a step id without its trajectory key)."""
    return step_suffix.partition(".")[0]


class OpenStep(Struct, frozen=True, array_like=True):
    """Index entry of a step in an open trajectory. All hashes have 63 bits.

    Attributes:
        offset: Offset on `claw.steps`.
        at: Event time of `claw.steps` when the step arrived, ms.
        step_suffix: Step id without its trajectory key.
        prompt, response: Lengths in tokens.
        base: Position of the step whose prompt and response were the longest prefix of this
            prompt on arrival. The cache keeps only the tokens after this prefix.
        end_hash: Hash of prompt and response; None without tokens.
        reason: Why the step cannot be trained; None if it can.
        oldest, newest: Version ids with the lowest and highest sync index.
        reply: Size of the reply and of the request's new messages, KiB.
        prompt_hash: Hash of the prompt tokens; without tokens, of the request.
        idempotency_hash: Hash of the idempotency key and the choice index.
        reply_hash: In a gateway-assigned session: what a request that continues from this reply
            will match.
        after: Position of the step that this step continues, if that is not `base`.
        retried: Position of the step that replaces this one; a replaced step is never trained.
        tags: Names of the tags.
        last_turn_hash: Hash of the last model turn in the request, if the prompt diverges from
            the sampled tokens.
        messages_hash, call_id_hash: In an anonymous session: hashes of the request's messages
            and of the id of the last tool call in the reply.
        exchange_hash: In an anonymous session: hash of the request's messages and the whole reply.
        words: In an anonymous session: a sample of the reply's words (`conversation.words_of`).
    """

    offset: int
    at: int
    step_suffix: str
    prompt: int
    response: int
    base: int | None
    end_hash: int | None
    status: StepStatus
    reason: str | None
    oldest: str | None
    newest: str | None
    reply: int = 0
    prompt_hash: int | None = None
    idempotency_hash: int | None = None
    reply_hash: int | None = None
    after: int | None = None
    retried: int | None = None
    tags: list[str] | None = None
    last_turn_hash: int | None = None
    messages_hash: int | None = None
    call_id_hash: int | None = None
    exchange_hash: int | None = None
    words: bytes | None = None

    @property
    def end(self) -> int:
        """Return the length of prompt and response, tokens."""
        return self.prompt + self.response

    @property
    def choice(self) -> str:
        """Return the choice index of the step in its call."""
        return self.step_suffix.rpartition(".")[2]


class OpenSteps(list[OpenStep]):
    """The steps of an open trajectory in log order, with lookup tables derived from them.

    The tables are not stored. They make the cost of a step independent of the number of earlier
    steps. Attributes (positions are list indexes; the first four cover only steps with sampled
    tokens):
        ends, prompt_lengths: Ascending lengths in tokens of prompt plus response, and of the
            prompt.
        ended: Latest position by `end_hash`.
        prompt_hashes: All values of `prompt_hash`.
        by_suffix: Position by step suffix.
        continued: One byte per position; 1 if a later step continues from it.
        failed, failed_untokenized: Positions of incomplete steps by `prompt_hash`, with and
            without tokens.
        keyed: Positions by `idempotency_hash`.
        size: Approximate payload size, bytes.
    """

    __slots__ = (
        "by_suffix",
        "continued",
        "ended",
        "ends",
        "failed",
        "failed_untokenized",
        "keyed",
        "prompt_hashes",
        "prompt_lengths",
        "size",
    )

    def __init__(self, steps: Iterable[OpenStep] = ()) -> None:
        super().__init__()
        self.by_suffix: dict[str, int] = {}
        self.ends, self.prompt_lengths = array("q"), array("q")
        self.ended: dict[int, int] = {}
        self.prompt_hashes: set[int | None] = set()
        self.continued = bytearray()
        self.failed: dict[int | None, list[int]] = {}
        self.failed_untokenized: dict[int | None, list[int]] = {}
        self.keyed: dict[int, list[int]] = {}
        self.size = 0
        for step in steps:
            self.append(step)

    def append(self, step: OpenStep) -> None:
        """Append a step. A replacement in place may change only `retried` and `reason`."""
        at = len(self)
        self.by_suffix[step.step_suffix] = at
        if step.end_hash is not None and step.response:
            _insert(self.ends, step.end)
            _insert(self.prompt_lengths, step.prompt)
            self.ended[step.end_hash] = at
            self.prompt_hashes.add(step.prompt_hash)
        self.continued.append(0)
        for i in (step.base, step.after):
            if i is not None:
                self.continued[i] = 1
        if step.status != "ok":
            failed = self.failed_untokenized if step.end_hash is None else self.failed
            failed.setdefault(step.prompt_hash, []).append(at)
        if step.idempotency_hash is not None:
            self.keyed.setdefault(step.idempotency_hash, []).append(at)
        self.size += self.size_of(step)
        super().append(step)

    def start_of(self, step: OpenStep) -> int:
        """Return how many prompt tokens are stored with the step's base."""
        return self[step.base].end if step.base is not None else 0

    def size_of(self, step: OpenStep) -> int:
        """Return the approximate payload size of a step, bytes."""
        tokens = step.prompt - self.start_of(step) + 2 * step.response
        return TOKEN_BYTES * tokens + (step.reply << 10) + STEP_BYTES


def _insert(numbers: array[int], number: int) -> None:
    """Insert a number into an ascending array, if absent."""
    at = bisect_left(numbers, number)
    if at == len(numbers) or numbers[at] != number:
        numbers.insert(at, number)

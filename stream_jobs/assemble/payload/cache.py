"""Cache of the payload that a trajectory's output needs from `claw.steps`, until the trajectory
closes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from clawstream.schemas.blob_refs import images_of
from clawstream.schemas.records import Step, Tag, VersionSpan
from clawstream.stream_jobs.assemble.payload.segment_tree import TOKEN_BYTES
from clawstream.stream_jobs.assemble.payload.trainability import Trainability


class StepPayload(NamedTuple):
    """Cached payload of a step. prompt: packed ids from token `start` on; earlier tokens belong to
    the base. tokens: whether all ids are known.
    """

    start: int
    prompt: bytes
    response: bytes
    tokens: bool
    logprobs: bytes | None
    versions: tuple[VersionSpan, ...]
    response_json: bytes
    finish_reason: str | None
    tags: tuple[Tag, ...]
    logprobs_temperature: float | None
    tokenizer_fingerprint: str | None
    new_messages_json: bytes | None
    images: tuple[str, ...]

    @property
    def size(self) -> int:
        """Return the approximate size in memory, bytes."""
        return (
            len(self.prompt)
            + len(self.response)
            + len(self.logprobs or b"")
            + len(self.response_json)
            + len(self.new_messages_json or b"")
            + 120 * len(self.images)
            + 400
        )


CachedPayload = StepPayload | bytes
"""A step's payload, or the metadata of an opened event."""


def payload_of(
    step: Step, origin: Trainability, start: int = 0, messages: bytes | None = None
) -> StepPayload:
    """Return the payload of a step without its first `start` prompt tokens. messages: see
    `new_messages`.
    """
    known = step.prompt_token_ids is not None and step.response_token_ids is not None
    response = step.response_token_ids or b""
    logprobs = step.response_logprobs
    return StepPayload(
        start=start if known else 0,
        prompt=(step.prompt_token_ids or b"")[start * TOKEN_BYTES :] if known else b"",
        response=response if known else b"",
        tokens=known,
        logprobs=logprobs
        if known and logprobs is not None and len(logprobs) == len(response)
        else None,
        versions=origin.versions,
        response_json=step.response_json,
        finish_reason=step.finish_reason,
        tags=step.tags,
        logprobs_temperature=origin.logprobs_temperature,
        tokenizer_fingerprint=step.tokenizer_fingerprint,
        new_messages_json=messages,
        images=images_of(step),
    )


class PayloadCache:
    """Payload by offset, bounded in bytes. Evicts the oldest entry first; it is read again from the
    log at closing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._entries: OrderedDict[int, CachedPayload] = OrderedDict()
        self.bytes = 0

    def put(self, offset: int, payload: CachedPayload) -> None:
        """Add an entry; may evict the oldest."""
        self.drop(offset)
        self._entries[offset] = payload
        self.bytes += _size(payload)
        while self.bytes > self._max and self._entries:
            _, old = self._entries.popitem(last=False)
            self.bytes -= _size(old)

    def split(self, starts: Mapping[int, int]) -> tuple[dict[int, CachedPayload], dict[int, int]]:
        """Return the cached payload of `starts` by offset, and the part of `starts` that is not
        cached.
        """
        found = {o: payload for o in starts if (payload := self._entries.get(o)) is not None}
        return found, {o: start for o, start in starts.items() if o not in found}

    def drop(self, offset: int) -> None:
        """Remove an entry whose trajectory has closed."""
        old = self._entries.pop(offset, None)
        if old is not None:
            self.bytes -= _size(old)

    def __len__(self) -> int:
        return len(self._entries)


def _size(payload: CachedPayload) -> int:
    return payload.size if isinstance(payload, StepPayload) else len(payload) + 100

"""Redacts complete records. Ids and keys never change, because agents and jobs refer to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from gateway.redaction.body import redacted_body
from gateway.redaction.scan import Scan
from gateway.redaction.token_edits import InconsistentTokens, Tokens, redacted_tokens
from gateway.redaction.vocabulary import TokenizerUnusable, UnknownToken, Vocabulary
from schemas.records import Curation, FailedCall, Reward, SessionEvent, Step, Tag

Record = Step | SessionEvent | FailedCall | Reward | Curation
R = TypeVar("R", bound=Record)

NOTHING = b"null"


class Redactor(Protocol):
    """Redacts a record. Pure: the result depends on the record alone."""

    def redact(self, record: R) -> R:
        """Return the redacted record, or `record` itself without secrets.

        May raise any exception; the caller then keeps `without_contents(record)`.
        """
        ...


class RuleRedactor:
    """Redacts by rules.

    vocabulary: Returns the vocabulary of a model name or None; raises TokenizerUnusable.
    """

    def __init__(self, scan: Scan, vocabulary: Callable[[str], Vocabulary | None]) -> None:
        self._scan, self._vocabulary = scan, vocabulary

    def redact(self, record: R) -> R:
        """Redact a record. Propagates exceptions of user-defined rules."""
        return cast(R, self._any(record))

    def _any(self, record: Record) -> Record:
        if isinstance(record, Step):
            return self._step(record)
        if isinstance(record, SessionEvent):
            return replace(
                record,
                metadata_json=self._body(record.metadata_json),
                reason=self._text(record.reason),
            )
        if isinstance(record, Reward):
            return replace(
                record, detail_json=self._body(record.detail_json), reason=self._text(record.reason)
            )
        if isinstance(record, FailedCall):
            error_type, agent = self._text(record.error_type), self._text(record.user_agent)
            return replace(
                record,
                message=self._required_text(record.message),
                error_type=error_type,
                user_agent=agent,
            )
        tags = None if record.tags is None else tuple(map(self._required_text, record.tags))
        return replace(record, note=self._text(record.note), tags=tags)

    def _step(self, step: Step) -> Step:
        new = {
            "request_json": redacted_body(step.request_json, self._scan),
            "response_json": redacted_body(step.response_json, self._scan),
            "user_agent": self._text(step.user_agent),
            "tokens_absent_reason": self._text(step.tokens_absent_reason),
        }
        tags = step.tags and tuple(
            Tag(name=self._required_text(t.name), evidence=self._required_text(t.evidence))
            for t in step.tags
        )
        tokens: dict[str, Any] = {}
        if step.prompt_token_ids is not None or step.response_token_ids is not None:
            tokens = self._tokens(step)
        changed = {name: value for name, value in new.items() if value is not getattr(step, name)}
        if not changed and not tokens and tags == step.tags:
            return step
        return replace(step, **{**changed, "tags": tags, **tokens})

    def _tokens(self, step: Step) -> dict[str, Any]:
        """Return the changed token fields."""
        try:
            vocabulary = self._vocabulary(step.model)
            if vocabulary is None:
                return _without_tokens(
                    f"redaction is on and has no tokenizer for model {step.model[:80]}"
                )
            old = Tokens(
                step.prompt_token_ids,
                step.response_token_ids,
                step.response_logprobs,
                step.versions,
            )
            new = redacted_tokens(old, vocabulary, self._scan)
        except (TokenizerUnusable, UnknownToken, InconsistentTokens) as error:
            return _without_tokens(f"redaction is on and cannot read the tokens: {error}")
        if new is old:
            return {}
        return {
            "prompt_token_ids": new.prompt,
            "response_token_ids": new.response,
            "response_logprobs": new.logprobs,
            "versions": new.versions,
            "redacted_prompt": new.redacted_prompt,
            "redacted_response": new.redacted_response,
        }

    def _body(self, body: bytes | None) -> bytes | None:
        return None if body is None else redacted_body(body, self._scan)

    def _text(self, text: str | None) -> str | None:
        return None if text is None else self._required_text(text)

    def _required_text(self, text: str) -> str:
        raw = text.encode("utf-8", "surrogatepass")
        new = self._scan.text(raw)
        return text if new is raw else new.decode("utf-8", "surrogatepass")


def without_contents(record: R, why: str) -> R:
    """Remove all user content from a record; keep ids, status and times.

    why: Reason, without content of the record.
    """
    return cast(R, _without_contents(record, f"redaction failed: {why}"))


def _without_contents(record: Record, reason: str) -> Record:
    if isinstance(record, Step):
        return replace(
            record, request_json=NOTHING, response_json=NOTHING, user_agent=None,
            idempotency_key=None, tags=(), blobs=(),
            **_without_tokens(reason),
        )  # fmt: skip
    if isinstance(record, SessionEvent):
        return replace(record, metadata_json=None, reason=record.reason and reason)
    if isinstance(record, Reward):
        return replace(record, detail_json=None, reason=record.reason and reason)
    if isinstance(record, FailedCall):
        return replace(
            record, message=reason, error_type=None, user_agent=None, idempotency_key=None
        )
    return replace(record, note=record.note and reason, tags=None if record.tags is None else ())


def _without_tokens(reason: str) -> dict[str, Any]:
    return {
        "prompt_token_ids": None,
        "response_token_ids": None,
        "response_logprobs": None,
        "tokens_absent_reason": reason,
        "versions": (),
        "redacted_prompt": (),
        "redacted_response": (),
    }

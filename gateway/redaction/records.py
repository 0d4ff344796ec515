"""Whole records without secrets and personal data. Ids and keys of records never change: agents and jobs refer to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from gateway.redaction.body import redacted_body
from gateway.redaction.scan import Scan
from gateway.redaction.token_edits import Tokens, TokensDisagree, redacted_tokens
from gateway.redaction.vocabulary import TokenizerUnusable, UnknownToken, Vocabulary
from schemas.records import Curation, FailedCall, Reward, SessionEvent, Step, Tag

Record = Step | SessionEvent | FailedCall | Reward | Curation
R = TypeVar("R", bound=Record)

NOTHING = b"null"


class Redactor(Protocol):
    """Takes out of a record what must not be kept. Pure: what it gives depends on the record alone."""

    def redact(self, record: R) -> R:
        """The record without it; the same object when there is none. May raise anything: then `emptied` is kept."""
        ...


class RuleRedactor:
    """Redacts by rules. vocabulary: of a model by name, None when there is none; raises TokenizerUnusable."""

    def __init__(self, scan: Scan, vocabulary: Callable[[str], Vocabulary | None]) -> None:
        self._scan, self._vocabulary = scan, vocabulary

    def redact(self, record: R) -> R:
        """Raises whatever a rule of somebody else's does."""
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
                record, message=self._said(record.message), error_type=error_type, user_agent=agent
            )
        tags = None if record.tags is None else tuple(map(self._said, record.tags))
        return replace(record, note=self._text(record.note), tags=tags)

    def _step(self, step: Step) -> Step:
        new = {
            "request_json": redacted_body(step.request_json, self._scan),
            "response_json": redacted_body(step.response_json, self._scan),
            "user_agent": self._text(step.user_agent),
            "tokens_absent_reason": self._text(step.tokens_absent_reason),
        }
        tags = step.tags and tuple(
            Tag(name=self._said(t.name), evidence=self._said(t.evidence)) for t in step.tags
        )
        tokens: dict[str, Any] = {}
        if step.prompt_token_ids is not None or step.response_token_ids is not None:
            tokens = self._tokens(step)
        changed = {name: value for name, value in new.items() if value is not getattr(step, name)}
        if not changed and not tokens and tags == step.tags:
            return step
        return replace(step, **{**changed, "tags": tags, **tokens})

    def _tokens(self, step: Step) -> dict[str, Any]:
        """What changes in the fields that are about tokens."""
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
        except (TokenizerUnusable, UnknownToken, TokensDisagree) as error:
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
        return None if text is None else self._said(text)

    def _said(self, text: str) -> str:
        raw = text.encode("utf-8", "surrogatepass")
        new = self._scan.text(raw)
        return text if new is raw else new.decode("utf-8", "surrogatepass")


def emptied(record: R, why: str) -> R:
    """The record without anything that anybody wrote: that it happened, where and how it ended stays. why: no words of the record's."""
    return cast(R, _emptied(record, f"redaction failed: {why}"))


def _emptied(record: Record, reason: str) -> Record:
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

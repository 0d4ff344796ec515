"""Redacts complete records. Ids and keys never change, because agents and jobs refer to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from clawstream.gateway.redaction.body import redacted_body
from clawstream.gateway.redaction.scan import Scan
from clawstream.gateway.redaction.token_edits import InconsistentTokens, Tokens, redacted_tokens
from clawstream.gateway.redaction.vocabulary import TokenizerUnusable, UnknownToken, Vocabulary
from clawstream.schemas.records import Curation, FailedCall, Reward, SessionEvent, Step, Tag

Record = Step | SessionEvent | FailedCall | Reward | Curation
R = TypeVar("R", bound=Record)

NOTHING = b"null"


class Contents(NamedTuple):
    """Names of the fields of a record that hold user content."""

    json: tuple[str, ...] = ()
    text: tuple[str, ...] = ()


CONTENTS: Mapping[type, Contents] = {
    Step: Contents(("request_json", "response_json"), ("user_agent", "tokens_absent_reason")),
    SessionEvent: Contents(("metadata_json",), ("reason",)),
    Reward: Contents(("detail_json",), ("reason",)),
    FailedCall: Contents((), ("message", "error_type", "user_agent")),
    Curation: Contents((), ("note",)),
}
"""Contents of each type of record, beside tags and token ids."""


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
        changed: dict[str, Any] = {}
        contents = CONTENTS[type(record)]
        for name in contents.json:
            body = getattr(record, name)
            if body is not None and (new := redacted_body(body, self._scan)) is not body:
                changed[name] = new
        for name in contents.text:
            text = getattr(record, name)
            if text is not None and (new_text := self._text(text)) is not text:
                changed[name] = new_text
        if isinstance(record, (Step, Curation)) and record.tags:
            tags = tuple(self._tag(tag) for tag in record.tags)
            if tags != record.tags:
                changed["tags"] = tags
        if isinstance(record, Step) and has_tokens(record):
            changed |= self._tokens(record)
        return replace(record, **changed) if changed else record

    def _tag(self, tag: Tag | str) -> Tag | str:
        if isinstance(tag, str):
            return self._text(tag)
        return Tag(name=self._text(tag.name), evidence=self._text(tag.evidence))

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

    def _text(self, text: str) -> str:
        raw = text.encode("utf-8", "surrogatepass")
        new = self._scan.text(raw)
        return text if new is raw else new.decode("utf-8", "surrogatepass")


def has_tokens(step: Step) -> bool:
    """Return whether a step has token ids."""
    return step.prompt_token_ids is not None or step.response_token_ids is not None


def content_bytes(record: Record) -> int:
    """Return the bytes of the contents of a record that may be large."""
    names = CONTENTS[type(record)].json
    if isinstance(record, Step):
        names += ("prompt_token_ids", "response_token_ids")
    return sum(len(getattr(record, name) or b"") for name in names)


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

"""Runs redaction in the gateway, in a thread for large records.

Redaction fails closed: when a rule raises any exception, the record is kept without its contents,
so no step is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from clawstream.gateway.errors import RedactionUnusable
from clawstream.gateway.redaction.records import (
    R,
    Record,
    Redactor,
    RuleRedactor,
    content_bytes,
    has_tokens,
    without_contents,
)
from clawstream.gateway.redaction.rules import RULES, Rule
from clawstream.gateway.redaction.scan import Finder, NamedFinder, Scan
from clawstream.gateway.redaction.vocabulary import TokenizerUnusable, Vocabulary
from clawstream.schemas.records import Step
from clawstream.schemas.rule_spec import is_own
from clawstream.schemas.settings import Settings
from clawstream.schemas.user_function import FunctionNotFound, load_function

THREAD_BYTES = 16 * 1024
"""Records larger than this are redacted in a thread: some contents cost 10 us a byte."""


class Vocabularies:
    """Tokenizers by model name (`*` for all others), loaded on first use. Thread-safe."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._loaded: dict[Path, Vocabulary | TokenizerUnusable] = {}
        self._lock = threading.Lock()

    def loaded(self, model: str) -> bool:
        """Tell whether `of` returns without loading a tokenizer."""
        path = self._path(model)
        return path is None or path in self._loaded

    def of(self, model: str) -> Vocabulary | None:
        """Return the vocabulary of a model; None without a tokenizer. Raises TokenizerUnusable."""
        path = self._path(model)
        if path is None:
            return None
        with self._lock:
            if path not in self._loaded:
                try:
                    self._loaded[path] = Vocabulary.load(path)
                except TokenizerUnusable as error:
                    self._loaded[path] = error
        found = self._loaded[path]
        if isinstance(found, TokenizerUnusable):
            raise found
        return found

    def _path(self, model: str) -> Path | None:
        return self._paths.get(model, self._paths.get("*"))


class Redaction:
    """Redacts records. failed: Called for each record kept without its contents."""

    def __init__(
        self, redactor: Redactor, vocabularies: Vocabularies, failed: Callable[[], None]
    ) -> None:
        self._redactor, self._vocabularies, self._failed = redactor, vocabularies, failed

    async def redacted(self, record: R) -> R:
        """Redact a record. Raises only MemoryError or CancelledError."""
        if content_bytes(record) > THREAD_BYTES or self._must_load(record):
            return await asyncio.to_thread(self.redact_now, record)
        return self.redact_now(record)

    def redact_now(self, record: R) -> R:
        """Redact a small record without tokens, in the calling thread."""
        try:
            return self._redactor.redact(record)
        except MemoryError:
            raise  # the record is not kept
        except Exception as error:  # noqa: BLE001 - a user's rule may raise anything
            self._failed()
            return without_contents(record, type(error).__name__)

    def _must_load(self, record: Record) -> bool:
        return (
            isinstance(record, Step)
            and has_tokens(record)
            and not self._vocabularies.loaded(record.model)
        )


def redaction_of(settings: Settings, secret: bytes, failed: Callable[[], None]) -> Redaction | None:
    """Build the redaction of the settings; None when it is off.

    Args:
        secret: Secret of the installation.
        failed: Called for each record kept without its contents.

    Raises:
        RedactionUnusable: Names the invalid setting.
    """
    config = settings.gateway.redaction
    if not config.enabled:
        return None
    rules, finders = [], []
    for name in config.rules:
        rule = _rule(name, settings.functions.folders)
        if isinstance(rule, Rule):
            rules.append(rule)
        else:
            finders.append(NamedFinder(name.rpartition(":")[2], rule))
    order = list(RULES)
    rules.sort(key=lambda rule: order.index(rule.name))
    paths = dict(config.tokenizers)
    if settings.gateway.tokenizer_path is not None:
        paths.setdefault("*", settings.gateway.tokenizer_path)
    for model, path in paths.items():
        if not path.exists():
            raise RedactionUnusable(
                f"gateway.redaction.tokenizers: {path}, for model {model}, does not exist"
            )
    key = hmac.digest(secret, b"clawstream redaction", hashlib.sha256)
    vocabularies = Vocabularies(paths)
    scan = Scan(rules, key, config.style, finders)
    return Redaction(RuleRedactor(scan, vocabularies.of), vocabularies, failed)


def _rule(name: str, folders: Sequence[Path]) -> Rule | Finder:
    if not is_own(name):
        if name not in RULES:
            raise RedactionUnusable(
                f"gateway.redaction.rules: {name!r} is not a rule; use {', '.join(RULES)}, "
                "file.py:function or module:function"
            )
        return RULES[name]
    try:
        return load_function(name, folders)
    except FunctionNotFound as error:
        raise RedactionUnusable(f"gateway.redaction.rules: {name!r}: {error}") from error

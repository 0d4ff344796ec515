"""Redaction in the gateway: when it is on, off the event loop when it takes long, and what is kept when it fails.

It fails closed. Whatever a rule raises, the record is still kept, so that no step is lost, but without its contents.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gateway.errors import RedactionUnusable
from gateway.redaction.records import R, Redactor, RuleRedactor, emptied
from gateway.redaction.rules import RULES, Rule
from gateway.redaction.scan import Finder, Named, Scan
from gateway.redaction.vocabulary import TokenizerUnusable, Vocabulary
from schemas.records import Reward, SessionEvent, Step
from schemas.rule_spec import is_own
from schemas.settings import Settings
from schemas.user_function import FunctionNotFound, load_function

THREAD_BYTES = 256 * 1024
"""From this size on a record is redacted in a thread: below it, it takes less than the loop's other work."""


class Vocabularies:
    """Tokenizers by model name, `*` for all others, each loaded when it is first needed. Safe to use from several threads."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = dict(paths)
        self._loaded: dict[Path, Vocabulary | TokenizerUnusable] = {}
        self._lock = threading.Lock()

    def loaded(self, model: str) -> bool:
        """Whether `of` gives an answer at once."""
        path = self._path(model)
        return path is None or path in self._loaded

    def of(self, model: str) -> Vocabulary | None:
        """None: the settings name none. Raises TokenizerUnusable, each time."""
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
    """A redactor in use. failed: called for each record that was kept without its contents."""

    def __init__(
        self, redactor: Redactor, vocabularies: Vocabularies, failed: Callable[[], None]
    ) -> None:
        self._redactor, self._vocabularies, self._failed = redactor, vocabularies, failed

    async def redacted(self, record: R) -> R:
        """What is kept of a record. Raises nothing but MemoryError, except when it is cancelled."""
        if _size(record) > THREAD_BYTES or (isinstance(record, Step) and self._must_load(record)):
            return await asyncio.to_thread(self.redacted_at_once, record)
        return self.redacted_at_once(record)

    def redacted_at_once(self, record: R) -> R:
        """The same on the caller's thread: for small records without tokens."""
        try:
            return self._redactor.redact(record)
        except MemoryError:
            raise  # nothing is kept, and nobody is told that it was
        except Exception as error:  # noqa: BLE001 - a rule may be anybody's; nothing it saw may be kept, not even its message
            self._failed()
            return emptied(record, type(error).__name__)

    def _must_load(self, step: Step) -> bool:
        with_ids = step.prompt_token_ids is not None or step.response_token_ids is not None
        return with_ids and not self._vocabularies.loaded(step.model)


def redaction_of(settings: Settings, secret: bytes, failed: Callable[[], None]) -> Redaction | None:
    """As the settings say; None when it is off. secret: the installation's. Raises RedactionUnusable that names the setting."""
    said = settings.gateway.redaction
    if not said.enabled:
        return None
    rules, finders = [], []
    for name in said.rules:
        rule = _rule(name, settings.functions.folders)
        if isinstance(rule, Rule):
            rules.append(rule)
        else:
            finders.append(Named(name.rpartition(":")[2], rule))
    order = list(RULES)
    rules.sort(key=lambda rule: order.index(rule.name))
    paths = dict(said.tokenizers)
    if settings.gateway.tokenizer_path is not None:
        paths.setdefault("*", settings.gateway.tokenizer_path)
    for model, path in paths.items():
        if not path.exists():
            raise RedactionUnusable(
                f"gateway.redaction.tokenizers: {path}, for model {model}, is not there"
            )
    key = hmac.digest(secret, b"clawstream redaction", hashlib.sha256)
    vocabularies = Vocabularies(paths)
    scan = Scan(rules, key, said.style, finders)
    return Redaction(RuleRedactor(scan, vocabularies.of), vocabularies, failed)


def _rule(name: str, folders: Sequence[Path]) -> Rule | Finder:
    if not is_own(name):
        if name not in RULES:
            raise RedactionUnusable(
                f"gateway.redaction.rules: {name!r} is no rule; there are {', '.join(RULES)}, file.py:function and module:function"
            )
        return RULES[name]
    try:
        return load_function(name, folders)
    except FunctionNotFound as error:
        raise RedactionUnusable(f"gateway.redaction.rules: {name!r}: {error}") from error


def _size(record: object) -> int:
    match record:
        case Step():
            fields = (
                record.request_json,
                record.response_json,
                record.prompt_token_ids,
                record.response_token_ids,
            )
            return sum(len(f or b"") for f in fields)
        case SessionEvent():
            return len(record.metadata_json or b"")
        case Reward():
            return len(record.detail_json or b"")
    return 0

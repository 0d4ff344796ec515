"""Read the settings: YAML file < `CLAWSTREAM__A__B` environment variables < `a.b=c` overrides.

Errors name the path of the setting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from clawstream.runtime.field_types import FieldType, field_at
from clawstream.runtime.process.secret_fields import holds_secret
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings

PREFIX = "CLAWSTREAM__"


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *heads, last = path.split(".")
    for head in heads:
        node = tree.setdefault(head, {})
        if not isinstance(node, dict):
            raise SettingsError(f"setting {path}: {head} has a value already, it can't have parts")
        tree = node
    tree[last] = value


def _got(error: ErrorDetails, path: str) -> str:
    value = error["input"]
    if isinstance(value, Mapping):
        # a whole section: what is wrong in it is in the message, and there may be a secret beside
        # it
        return ""
    return ", got (not shown)" if _hidden(error, path) else f", got {value!r:.80}"


def _hidden(error: ErrorDetails, path: str) -> bool:
    """Whether the value may be secret; that of a setting with a misspelt name may be, too."""
    return error["type"] == "extra_forbidden" or holds_secret(Settings, path)


def _said(error: ErrorDetails) -> str:
    return "there is no such setting" if error["type"] == "extra_forbidden" else error["msg"]


class _ValueLoader(yaml.SafeLoader):
    """YAML without aliases: a few hundred characters with them stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)


def _construct(text: str, loader: type[yaml.SafeLoader], kind: FieldType) -> Any:
    """Return the value of a YAML document; what is text in the settings stays as it is written."""
    source = loader(text)
    try:
        node = source.get_single_node()
        if node is None:
            return None
        _keep_text(node, kind, set())
        return source.construct_document(node)
    finally:
        source.dispose()


def _keep_text(node: yaml.Node, kind: FieldType, seen: set[int]) -> None:
    """Mark scalars as strings where the settings have text: `010` is an id, and no octal number."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        is_null = node.tag == _NULL and kind.optional
        if kind.is_text and not is_null and node.tag != _MERGE:
            node.tag = _STRING
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _keep_text(item, kind.of(None), seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _keep_text(key, kind.keys, seen)
            _keep_text(value, kind.of(str(key.value)), seen)


_NULL, _STRING, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("null", "str", "merge"))
_NULLS = ("", "~", "null", "Null", "NULL")


def value_of(text: str, path: str) -> Any:
    """Return the value that is written for a setting.

    Text stays as it is written, but for quotes around it; anything else is YAML.

    Raises:
        SettingsError: It is no YAML. The message names the path.
    """
    kind = field_at(Settings, path)
    if kind.is_text:
        return _text(text.strip(), kind.optional)
    try:
        return _construct(text, _ValueLoader, kind)
    # ValueError: a date that does not exist, or too many digits. RecursionError: too many brackets.
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        if kind.annotation is None or holds_secret(Settings, path):
            raise SettingsError(f"setting {path}: not valid YAML; put it in quotes") from None
        raise SettingsError(f"setting {path}: {text[:80]!r} is not valid YAML: {e}") from e


def _text(text: str, optional: bool) -> str | None:
    if optional and text in _NULLS:
        return None
    if text[:1] in ("'", '"'):
        with suppress(yaml.YAMLError):
            unquoted = yaml.load(text, _ValueLoader)
            return unquoted if isinstance(unquoted, str) else text
    return text


STANDARD_INPUT = Path("-")


def merge_sources(
    file: Path | None, overrides: Iterable[str], environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Merge the sources into a tree that is not validated yet.

    Args:
        file: A YAML file; `-` is standard input.
        overrides: Texts `a.b=c`.
        environ: Environment variables; default those of the process.

    Raises:
        SettingsError: A source cannot be parsed.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            text = sys.stdin.read() if file == STANDARD_INPUT else file.read_text()
            loaded = _construct(text, yaml.SafeLoader, FieldType(Settings))
        # ValueError: no text in UTF-8, or what `value_of` names.
        except (OSError, yaml.YAMLError, ValueError, RecursionError) as e:
            raise SettingsError(f"settings file {file}: {e}") from e
        if loaded is not None and not isinstance(loaded, dict):
            raise SettingsError(f"settings file {file}: the top must be a mapping")
        tree = loaded or {}
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX):
            path = name[len(PREFIX) :].lower().replace("__", ".")
            _set(tree, path, value_of(text, path))
    for word in overrides:
        path, sep, text = word.partition("=")
        if not sep or not path:
            raise SettingsError(f"word {word!r}: settings are written a.b=c")
        _set(tree, path, value_of(text, path))
    return tree


def load(
    file: Path | None = None,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings. Raises SettingsError with one line for each wrong path."""
    return with_folders(validated(merge_sources(file, overrides, environ)), file)


def with_folders(settings: Settings, file: Path | None) -> Settings:
    """Add the folders of the user's functions, so that child processes search them too."""
    if settings.functions.dirs or not settings.names_functions:
        return settings
    folders = dict.fromkeys([Path.cwd(), *([file.absolute().parent] if file is not None else [])])
    functions = settings.functions.model_copy(update={"dirs": tuple(folders)})
    return settings.model_copy(update={"functions": functions})


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings with other values, by path, validated again.

    Raises:
        SettingsError: A value is wrong.
    """
    tree = settings.model_dump()
    for path, value in values.items():
        _set(tree, path, value)
    return validated(tree)


def validated(tree: Mapping[str, Any]) -> Settings:
    """The settings of a tree. Raises SettingsError with one line for each wrong path."""
    try:
        return Settings.model_validate(tree)
    except ValidationError as e:
        found = [(".".join(map(str, i["loc"])), i) for i in e.errors()]
        lines = [f"setting {path or '(all)'}: {_said(i)}{_got(i, path)}" for path, i in found]
        raise SettingsError("\n".join(lines)) from (
            None if any(_hidden(i, path) for path, i in found) else e
        )


def overrides_of(settings: Settings) -> list[str]:
    """Overrides that give a child process exactly these settings."""
    import json

    return [
        f"{k}={json.dumps(v)}"
        for k, v in settings.model_dump(mode="json", exclude_defaults=True).items()
    ]

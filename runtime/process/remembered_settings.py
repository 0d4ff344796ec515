"""The settings of the last `clawstream up` on a data directory, in `<data_dir>/settings.json`.

Every command starts from them; its own file, environment and overrides take precedence. Secrets are
never written: the file names their paths, and a process that needs them must be given them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from clawstream.runtime.atomic_file import write_durably
from clawstream.runtime.process.config import (
    STANDARD_INPUT,
    merge_sources,
    validated,
    with_folders,
    with_values,
)
from clawstream.runtime.process.secret_fields import ITEM, secret_fields
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings
from clawstream.schemas.settings.base import Secret

FILE = "settings.json"
FIXED = (("kafka", "partitions"), ("broker", "hosts"))
"""What the data was made with: it cannot change while its topics are the same."""
TELLING = (
    "run_id",
    "kafka.topic_prefix",
    "kafka.bootstrap_servers",
    "broker.data_dir",
    "lake.uri",
    "gateway.blob_uri",
)
"""What may change, but leaves data behind: `up` says so."""
_SECRET = re.compile(
    r"(secret|password|passphrase|token|credential|key|jaas|connection_string|\bsas\b)(?!.*location$)",
    re.IGNORECASE,
)
"""Names of options, of libraries that are not ours, whose values are not written."""
_SECRET_WORD = re.compile(
    r"(^|[-_.])(secret|password|passphrase|token|credentials?|key|apikey)$", re.IGNORECASE
)
"""How the name of a secret vLLM argument ends: `--api-key`, but not `--tokenizer`."""
_JSON_NAME = re.compile(r'"([^"]+)"\s*:')


def remember(settings: Settings) -> bytes | None:
    """Write the settings into their data directory, for the owner of this process alone.

    Returns:
        What the file contained before, None when there was no file.

    Raises:
        OSError: The file cannot be written.
    """
    path = settings.data_dir / FILE
    before = path.read_bytes() if path.exists() else None
    tree, withheld = public(settings)
    tree.pop("data_dir", None)  # it is where the file is found
    content = {"settings": tree, "withheld": withheld}
    write_durably(path, json.dumps(content, indent=1).encode(), 0o600)
    return before


def forget(directory: Path, before: bytes | None) -> None:
    """Restore the remembered settings. before: The file's former content, None for no file."""
    if before is None:
        (directory / FILE).unlink(missing_ok=True)
    else:
        write_durably(directory / FILE, before, 0o600)


def load_remembered(
    file: Path | None, overrides: Iterable[str], environ: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of the sources on top of those that their data directory remembers.

    Raises:
        SettingsError: One line for each wrong path, and for a setting that the data does not allow
            to change.
    """
    stated = merge_sources(file, overrides, environ)
    if file == STANDARD_INPUT:  # `up` gives its processes all there is to know
        return validated(stated)
    directory = Path(str(stated.get("data_dir", Settings.model_fields["data_dir"].default)))
    kept, _ = _read(directory)
    settings = validated(_merged(Settings, kept, stated))
    if not kept:
        return with_folders(settings, file)
    before = validated(kept)
    _check_fixed(before, settings, directory)
    if "dirs" in stated.get("functions", {}) or _functions(settings) == _functions(before):
        return with_folders(settings, file)
    # Functions that are named now are looked for here first, then where those of before were found.
    here = with_folders(with_values(settings, {"functions.dirs": ()}), file).functions.dirs
    return with_values(
        settings, {"functions.dirs": tuple(dict.fromkeys([*here, *before.functions.dirs]))}
    )


def _functions(settings: Settings) -> tuple[object, ...]:
    jobs, gateway = settings.jobs, settings.gateway
    return (
        jobs.reward_functions,
        jobs.quality_functions,
        gateway.compute_reward,
        gateway.redaction.rules,
    )


def missing_secrets(settings: Settings) -> list[str]:
    """Return the paths of secrets that `up` was given and that these settings lack.

    Engines and options that have changed since are skipped: their secrets come with the new values.
    """
    kept, paths = _read(settings.data_dir)
    if not paths:
        return []
    before, now = validated(kept).model_dump(mode="json"), settings.model_dump(mode="json")
    return [
        ".".join(path)
        for path in paths
        if not _at(now, path) and (len(path) == 2 or _at(now, path[:-1]) == _at(before, path[:-1]))
    ]


def changes(settings: Settings) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value before and value now of what leaves data behind when it changes."""
    kept, _ = _read(settings.data_dir)
    if kept:
        before, now = (
            validated(kept).model_dump(mode="json"),
            _absolute(settings.model_dump(mode="python")),
        )
        for path in TELLING:
            was, value = _at(before, path.split(".")), _at(now, path.split("."))
            if was != value:
                yield path, was, value


def _read(directory: Path) -> tuple[dict[str, Any], list[list[str]]]:
    path = directory / FILE
    try:
        content = json.loads(path.read_bytes())
        return dict(content["settings"]), list(content["withheld"])
    except FileNotFoundError:
        return {}, []
    except NotADirectoryError as error:
        raise SettingsError(f"setting data_dir={directory}: a part of it is a file") from error
    except PermissionError as error:
        raise SettingsError(
            f"{path} cannot be read: run this as the owner of the data directory, or set another "
            "data_dir"
        ) from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{path} cannot be read: {error}. Delete it, and give `clawstream up` its settings "
            "again"
        ) from error


def _merged(
    section: type[BaseModel], below: Mapping[str, Any], above: Mapping[str, Any]
) -> dict[str, Any]:
    """Sections are merged; values, also those that are mappings, are replaced."""
    merged = dict(below) | dict(above)
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            parts = below.get(name), above.get(name)
            if isinstance(parts[0], Mapping) and isinstance(parts[1], Mapping):
                merged[name] = _merged(kind, parts[0], parts[1])
    return merged


def _check_fixed(before: Settings, now: Settings, directory: Path) -> None:
    same_topics = (
        before.kafka.topic_prefix == now.kafka.topic_prefix
        and before.kafka.bootstrap_servers == now.kafka.bootstrap_servers
        and before.broker.data_dir == now.broker.data_dir
    )
    if not same_topics:
        return
    was, value = before.model_dump(), now.model_dump()
    wrong = [
        f"setting {'.'.join(path)}={_at(value, path)}: the data in {directory} was made with "
        f"{_at(was, path)}, and that cannot change"
        for path in FIXED
        if _at(was, path) != _at(value, path)
    ]
    if wrong:
        raise SettingsError("\n".join(wrong))


def _at(tree: Any, path: Sequence[str]) -> Any:
    for name in path:
        if isinstance(tree, list | tuple):
            tree = tree[int(name)] if int(name) < len(tree) else None
        else:
            tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _absolute(value: Any) -> Any:
    """Paths mean the same from every working directory; everything else as JSON has it."""
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Mapping):
        return {str(k): _absolute(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_absolute(v) for v in value]
    return value


def public(settings: Settings) -> tuple[dict[str, Any], list[list[str]]]:
    """Return the settings in the form to write to a file, and the paths of the omitted secrets.

    The form has no default values, absolute paths, and only values that JSON supports.
    """
    tree: dict[str, Any] = _absolute(settings.model_dump(exclude_defaults=True))
    withheld = [
        path
        for pattern, mark in secret_fields(Settings)
        for path in _values(tree, pattern)
        if _at(tree, path) is not None and _is_secret(mark, path, _at(tree, path))
    ]
    for path in withheld:
        del _at(tree, path[:-1])[path[-1]]
    return tree, withheld


def _is_secret(mark: Secret, path: Sequence[str], value: Any) -> bool:
    match mark.written:
        case "nothing":
            return True
        case "options":
            return _SECRET.search(path[-1]) is not None
        case "arguments":
            return any(
                _SECRET_WORD.search(name)
                for word in value
                for name in (word.partition("=")[0], *_JSON_NAME.findall(word))
                if name.startswith("-") or name != word
            )
        case "all":
            return False


def _values(tree: Any, pattern: Sequence[str]) -> Iterator[list[str]]:
    """Yield the paths of the values at a pattern; of a mapping, that of each value."""
    if isinstance(tree, Mapping) and not pattern:
        pattern = (ITEM,)
    if not pattern:
        yield []
        return
    name, *rest = pattern
    if isinstance(tree, list):
        items = {str(number): value for number, value in enumerate(tree)}
    else:
        items = dict(tree) if isinstance(tree, Mapping) else {}
    for key, value in items.items():
        if name in (ITEM, key):
            for path in _values(value, rest):
                yield [key, *path]

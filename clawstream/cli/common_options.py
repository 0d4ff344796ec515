"""Shared parts of the command line: options, settings, one-line errors, lazy imports."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_type_hints

import typer

if TYPE_CHECKING:
    from clawstream.runtime.kafka import Cluster
    from clawstream.schemas.settings import Settings

PATIENCE_S = 5.0
"""How long a command that a person waits for looks for Kafka."""
_OF_A_PROCESS = ("gateway.", "rollout.")
"""Settings whose secrets one process alone needs, so that other commands do not miss them."""

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings, e.g. trainer.lr=1e-6.")
]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
Form = Annotated[Literal["table", "json"], typer.Option("--format", "-f", help="How to print it.")]
Run = Annotated[str | None, typer.Option("--run", "-r", help="Records of this run only.")]
By = Annotated[str | None, typer.Option("--by", help="Who; default you@this-host.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it.")]
Since = Annotated[
    str | None,
    typer.Option("--since", help="Begin here: 2026-11-22T08:00 (UTC), ms since the epoch, 2h, 7d."),
]
Until = Annotated[
    str | None, typer.Option("--until", help="End before this time; default: everything so far.")
]
AsOf = Annotated[
    str | None, typer.Option("--as-of", help="The lake as of a time, or a named snapshot.")
]


def group(help_text: str | None = None) -> typer.Typer:
    """Create a group of commands. help_text: None for the groups of `clawstream.cli.main.GROUPS`,
    which has theirs.
    """
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


def command(
    app: typer.Typer, name: str | None = None, **providers: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Register a function as a command.

    Args:
        providers: For parameters that are not options themselves: a function whose parameters are
            options and whose result is the argument. `settings` has one already.
    """
    provided = {"settings": _settings, **providers}

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function).parameters
        options = {
            n: _options(provided[n]) if n in provided else [p]
            for n, p in zip(own, _options(function), strict=True)
        }

        def call(**given: Any) -> None:
            if "settings" in own:
                _refuse_settings_as_words(given, options)
            arguments = {n: [given[p.name] for p in of_n] for n, of_n in options.items()}
            function(*(provided[n](*a) if n in provided else a[0] for n, a in arguments.items()))

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            list(chain.from_iterable(options.values()))
        )
        app.command(name)(call)
        return function

    return register


def _options(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, each with its annotation as a value."""
    hints = get_type_hints(function, localns={"Settings": object}, include_extras=True)
    return [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name])
        for p in inspect.signature(function).parameters.values()
    ]


def _refuse_settings_as_words(
    given: Mapping[str, Any], options: Mapping[str, Sequence[inspect.Parameter]]
) -> None:
    """End with 2 when a setting stands where a required word of the command belongs."""
    from clawstream.schemas.settings import Settings

    for option in chain.from_iterable(options.values()):
        if option.default is not inspect.Parameter.empty:
            continue
        name = re.match(r"(\w+)[\w.]*=", str(given[option.name]))
        if name is not None and name[1] in Settings.model_fields:
            word = option.name.upper()
            fail(f"{word} is missing: settings such as {given[option.name]!r} stand after it", 2)


def _settings(overrides: Overrides = None, config: Config = None) -> Settings:
    return settings_of(config, overrides)


def names_and_overrides(words: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Split the words of a command into names and settings: only settings have an equals sign."""
    return [w for w in words or () if "=" not in w], [w for w in words or () if "=" in w]


def settings_of(config: Path | None, overrides: list[str] | None, fresh: bool = False) -> Settings:
    """Return the settings on top of those that the data directory remembers; exit 2 on a wrong one.

    Secrets are not remembered: missing ones of Kafka and the lake are named on standard error.

    fresh: Ignore the remembered settings.
    """
    from clawstream.runtime.process.config import load as read
    from clawstream.runtime.process.remembered_settings import load_remembered, missing_secrets
    from clawstream.schemas.errors import SettingsError

    try:
        if fresh:
            return read(config, overrides or ())
        settings = load_remembered(config, overrides or ())
    except SettingsError as e:
        fail(str(e), 2)
    _report_withheld(p for p in missing_secrets(settings) if not p.startswith(_OF_A_PROCESS))
    return settings


def _report_withheld(paths: Iterable[str]) -> None:
    for path in paths:
        sys.stderr.write(
            f"clawstream: setting {path} is a secret, so it is not remembered: give it again\n"
        )


def fail(message: str, code: int = 1) -> NoReturn:
    """End with one line on standard error."""
    sys.stderr.write(f"clawstream: {message}\n")
    raise SystemExit(code)


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value for a program to read."""
    typer.echo(json.dumps(value, indent=indent, default=str, ensure_ascii=False))


def instant(text: str | None, name: str) -> int | None:
    """Parse an option to milliseconds since the epoch, None to None; exit 2 on a wrong time."""
    from datetime import UTC, datetime

    from clawstream.runtime.times import millis, parse_instant

    try:
        return None if text is None else millis(parse_instant(text, datetime.now(UTC)))
    except ValueError as e:
        fail(f"{name} {e}", 2)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Report errors that a user can do something about in one line, without a traceback."""
    from clawstream.schemas.errors import ForeseenError

    try:
        yield
    except (ForeseenError, OSError) as e:
        from clawstream.runtime.exit_codes import exit_code, is_foreseen, message_of

        if not is_foreseen(e):
            raise
        fail(message_of(e), exit_code(e))


def cluster_of(settings: Settings) -> Cluster:
    """Return the cluster of the settings, which answers.

    Raises:
        Unavailable: It does not answer within `PATIENCE_S`.
    """
    from clawstream.runtime.topics.records import cluster_of as connect

    cluster = connect(settings)
    cluster.ask(PATIENCE_S)
    return cluster


def load(module: str) -> ModuleType:
    """Import a module when its command runs; exit with a hint when a library is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] == module.partition(".")[0]:
            raise
        fail(f"{module} needs the package {e.name}, which is not installed: see docs/install.md")


def run(
    target: str, config: Path | None, overrides: list[str] | None, check: str | None = None
) -> None:
    """Call `module:function`, which starts a process, with the settings. check: Called before."""
    from clawstream.runtime.process.remembered_settings import missing_secrets

    settings = settings_of(config, overrides)
    own = f"{target.partition('.')[0]}."
    if own in _OF_A_PROCESS:
        _report_withheld(p for p in missing_secrets(settings) if p.startswith(own))
    for name in (check, target) if check is not None else (target,):
        module, _, function = name.partition(":")
        getattr(load(module), function)(settings)

"""Shared parts of the command line: options, settings, one-line errors, lazy imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from runtime.kafka import Cluster
    from schemas.settings import Settings

PATIENCE_S = 5.0
"""How long a command that a person waits for looks for Kafka."""
_OF_A_PROCESS = ("gateway.", "rollout.")
"""Settings whose secrets one process alone needs, so that other commands do not miss them."""

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings, e.g. trainer.lr=1e-6.")
]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
Form = Annotated[Literal["table", "json"], typer.Option("--format", "-f", help="How to print it.")]


def group(help_text: str) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


def settings_of(config: Path | None, overrides: list[str] | None, fresh: bool = False) -> Settings:
    """Return the settings on top of those that the data directory remembers; exit 2 on a wrong one.

    Secrets are not remembered: missing ones of Kafka and the lake are named on standard error.

    fresh: Ignore the remembered settings.
    """
    from runtime.process.config import load as read
    from runtime.process.remembered_settings import load_remembered, missing_secrets
    from schemas.errors import SettingsError

    try:
        if fresh:
            return read(config, overrides or ())
        settings = load_remembered(config, overrides or ())
        for path in missing_secrets(settings):
            if not path.startswith(_OF_A_PROCESS):
                _tell_withheld(path)
        return settings
    except SettingsError as e:
        fail(str(e), 2)


def _tell_withheld(path: str) -> None:
    sys.stderr.write(
        f"clawstream: setting {path} is a secret, so it is not remembered: give it again\n"
    )


def fail(message: str, code: int = 1) -> NoReturn:
    """End with one line on standard error."""
    sys.stderr.write(f"clawstream: {message}\n")
    raise SystemExit(code)


def instant(text: str | None, name: str) -> int | None:
    """Parse an option to milliseconds since the epoch, None to None; exit 2 on a wrong time."""
    from datetime import UTC, datetime

    from runtime.times import millis, parse_instant

    try:
        return None if text is None else millis(parse_instant(text, datetime.now(UTC)))
    except ValueError as e:
        fail(f"{name} {e}", 2)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors that a user can do something about, as one line without a traceback."""
    from schemas.errors import ForeseenError

    try:
        yield
    except ForeseenError as e:
        from runtime.exit_codes import exit_code

        fail(str(e) or type(e).__name__, exit_code(e))


def cluster_of(settings: Settings) -> Cluster:
    """The cluster of the settings, which answers. Raises Unavailable soon when it does not."""
    from runtime.topics.records import cluster_of as connect

    cluster = connect(settings)
    cluster.ask(PATIENCE_S)
    return cluster


def load(module: str) -> ModuleType:
    """Import a module when its command runs; exit with a hint when a library is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is not None and e.name.partition(".")[0] == module.partition(".")[0]:
            raise
        fail(f"{module} needs the package {e.name}, which is not installed: see docs/install.md")


def run(target: str, config: Path | None, overrides: list[str] | None, fresh: bool = False) -> None:
    """Call `module:function`, which starts a process, with the settings.

    fresh: As in `settings_of`.
    """
    from runtime.process.remembered_settings import missing_secrets

    settings = settings_of(config, overrides, fresh)
    module, _, function = target.partition(":")
    own = f"{module.partition('.')[0]}."
    if own in _OF_A_PROCESS:
        for path in missing_secrets(settings):
            if path.startswith(own):
                _tell_withheld(path)
    getattr(load(module), function)(settings)

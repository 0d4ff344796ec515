"""`clawstream policy` and `clawstream run end`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from clawstream.cli.common_options import (
    Config,
    Form,
    Overrides,
    cluster_of,
    fail,
    group,
    load,
    settings_of,
)
from clawstream.runtime.user import current_user

app = group()
run_app = group()

Run = Annotated[str | None, typer.Option("--run", "-r", help="Of this run instead of run_id.")]
By = Annotated[str | None, typer.Option("--by", help="Who; default you@this-host.")]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FIELD=VALUE]... [a.b=c]...", help="E.g. min_quality=0.5; settings."),
]
_HIDDEN = ("run_id", "policy_version", "published_by", "created_at")


@contextmanager
def _log_of(run: str | None, overrides: list[str] | None, config: Path | None) -> Iterator[Any]:
    """Open the policies of a run; a refused policy ends the command with exit code 2."""
    settings = settings_of(config, overrides)
    if run is not None:
        settings = load("clawstream.runtime.process.config").with_values(settings, {"run_id": run})
    module, errors = (
        load("clawstream.stream_jobs.admit.policy_log"),
        load("clawstream.stream_jobs.errors"),
    )
    try:
        yield module.PolicyLog(settings, cluster_of(settings))
    except errors.PolicyRefused as e:
        fail(str(e), 2)


@app.command("show")
def show(
    overrides: Overrides = None,
    run: Run = None,
    history: Annotated[
        bool, typer.Option("--history", help="Every policy, oldest first, with its changes.")
    ] = False,
    config: Config = None,
    form: Form = "table",
) -> None:
    """Show the policy of a run, and whether admission has applied it."""
    with _log_of(run, overrides, config) as log:
        if history:
            _print_history(log, form)
            return
        entry = log.newest
        if entry is None:
            fail("the run has no policy yet: `clawstream admit` publishes that of the settings")
        behind = log.behind(entry)
        if form == "json":
            typer.echo(
                json.dumps({**_entry_as_dict(entry), "behind": behind, "ended_at": log.ended})
            )
            return
        typer.echo(f"{_title(entry)}{'' if log.ended is None else ', the run has ended'}")
        for channel, records in behind.items():
            typer.echo(f"  {channel}: {_standing(records)}")
        fields = {k: v for k, v in _entry_as_dict(entry)["policy"].items() if k not in _HIDDEN}
        width = max(map(len, fields))
        for name, value in fields.items():
            typer.echo(f"  {name.ljust(width)}  {json.dumps(value)}")


@app.command("set")
def set_fields(
    overrides: Changes = None, run: Run = None, by: By = None, config: Config = None
) -> None:
    """Change fields of the policy, named as in admit.policy.*; other fields keep their values."""
    from clawstream.schemas.settings import Settings

    changes, others = dict[str, str](), list[str]()
    for word in overrides or ():
        name, _, text = word.partition("=")
        if "." in name or name in Settings.model_fields:
            others.append(word)
        else:
            changes[name] = text
    if not changes:
        fail("nothing to set: say e.g. min_quality=0.5", 2)
    with _log_of(run, others, config) as log:
        checks = (load("clawstream.trainer.settings_check").check_algorithm,)
        before, entry = log.newest, log.set(changes, by or current_user(), checks)
        was, now = _entry_as_dict(before)["policy"], _entry_as_dict(entry)["policy"]
        typer.echo(_title(entry))
        for name in now:
            if was[name] != now[name] and name not in _HIDDEN:
                typer.echo(f"  {name}: {json.dumps(was[name])} -> {json.dumps(now[name])}")


@run_app.command("end")
def end(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Its id.")],
    overrides: Overrides = None,
    config: Config = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why; kept on the log.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it.")] = False,
) -> None:
    """End a run for ever: ready groups become a last batch, everything else is refused."""
    if not yes:
        fail(f"run {run} would take no more trajectories, for ever; say --yes to end it")
    with _log_of(run, overrides, config) as log:
        typer.echo(f"run {run} ends at offset {log.end(reason)} of {log.topic}-{log.partition}")


def _print_history(log: Any, form: str) -> None:
    """Print every policy, oldest first, with its changes."""
    if form == "json":
        typer.echo(json.dumps([_entry_as_dict(e) for e in log.entries]))
        return
    was: dict[str, Any] = {}
    for entry in log.entries:
        now = _entry_as_dict(entry)["policy"]
        changed = [
            f"{k}={json.dumps(now[k])}"
            for k in now
            if k not in _HIDDEN and was and was.get(k) != now[k]
        ]
        what = f"ignored: {entry.rejection}" if entry.rejection else ", ".join(changed)
        typer.echo(f"{_title(entry)}: {what or 'unchanged'}" if was else _title(entry))
        was = was if entry.rejection else now
    if log.ended is not None:
        typer.echo(f"ended at offset {log.ended}")


def _entry_as_dict(entry: Any) -> dict[str, Any]:
    return {
        "offset": entry.offset,
        "timestamp_ms": entry.timestamp_ms,
        "rejection": entry.rejection,
        "policy": asdict(entry.policy),
    }


def _title(entry: Any) -> str:
    at = datetime.fromtimestamp(entry.timestamp_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"policy {entry.policy.policy_version} of {entry.policy.run_id}, by "
        f"{entry.policy.published_by or 'settings'}, {at} UTC"
    )


def _standing(records: int | None) -> str:
    if records is None:
        return "no admission has run yet"
    return "in force" if records == 0 else f"admission is {records} records before it"

"""`clawstream tables`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from schemas.settings import Settings

app = group("The tables of the lake.")
Name = Annotated[
    str | None, typer.Argument(metavar="[TABLE]", help="One table; all of them without.")
]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="a.b=c", help="A setting.")]


def _settings(config: Path | None, overrides: list[str] | None, sets: list[str] | None) -> Settings:
    """Return the settings of overrides and of `--set` (beside an optional TABLE)."""
    return settings_of(config, [*(overrides or ()), *(sets or ())])


def _print(rows: Sequence[Mapping[str, Any]], output: str) -> None:
    if output == "json":
        typer.echo(json.dumps(list(rows)))
    elif rows:
        names = list(rows[0])
        values = [["" if row[n] is None else row[n] for n in names] for row in rows]
        typer.echo(load("clawstream.query.result_format").as_text(names, values))


@app.command("list")
def tables_list(
    overrides: Overrides = None, config: Config = None, sets: Set = None, output: Form = "table"
) -> None:
    """Rows, files, bytes, version and newest row of each table."""
    settings = _settings(config, overrides, sets)
    _print(load("stream_jobs.lake.delta.snapshots").tables(settings), output)


@app.command()
def history(
    table: Annotated[str, typer.Argument(help="Table.")],
    overrides: Overrides = None,
    config: Config = None,
    sets: Set = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Newest commits.")] = 20,
    output: Form = "table",
) -> None:
    """The newest commits of a table."""
    settings = _settings(config, overrides, sets)
    entries = load("stream_jobs.lake.delta.snapshots").history(settings, table, limit)
    if output == "table":
        entries = [{**e, "metrics": json.dumps(e["metrics"])} for e in entries]
    _print(entries, output)


@app.command()
def repair(
    table: Annotated[str, typer.Argument(help="Table.")],
    overrides: Overrides = None,
    config: Config = None,
    sets: Set = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say which files can't be read.")
    ] = False,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Give up records that are in no readable version and no more on Kafka.",
        ),
    ] = False,
) -> None:
    """Restore a damaged table to its newest readable version.

    The writer reads the rest from the topics.
    """
    settings = _settings(config, overrides, sets)
    module = load("stream_jobs.lake.delta.repair")
    if check:
        flaws = module.check(settings, table)
        typer.echo("\n".join(flaws) or f"{table}: every file can be read")
        raise SystemExit(1 if flaws else 0)
    done = module.repair(settings, table, cluster_of(settings), accept_loss)
    for flaw in done.damage:
        typer.echo(flaw)
    if done.restored is None:
        typer.echo(f"{table}: no row had to be taken back")
        return
    typer.echo(
        f"{table}: restored version {done.restored}; {done.rows} rows are read again by the "
        "writer, or by its next start"
    )
    for rewind in done.rewinds:
        given_up = f", {rewind.lost} offsets are given up" if rewind.lost else ""
        typer.echo(
            f"  {rewind.topic}-{rewind.partition[1]}: from offset "
            f"{max(rewind.target, rewind.low)}, was {rewind.former}{given_up}"
        )
    if done.snapshots:
        typer.echo(f"snapshots that lack the rows of the lost commits: {', '.join(done.snapshots)}")


@app.command()
def compact(table: Name = None, sets: Set = None, config: Config = None) -> None:
    """Merge small files; delete expired rows and unneeded files. The writer may keep running."""
    settings = _settings(config, None, sets)
    maintenance = load("stream_jobs.lake.delta.maintenance")
    for done in maintenance.maintain(settings, None if table is None else [_known(table)]):
        typer.echo(
            f"{done.table}: {done.merged_files} files into {done.made_files}, "
            f"{done.deleted_rows} old rows and "
            f"{done.deleted_files} old files deleted"
            + (f"; the rest next time: {done.deferred}" if done.deferred else "")
        )


@app.command()
def vacuum(table: Name = None, sets: Set = None, config: Config = None) -> None:
    """Delete files that no version within lake.history_days and no named snapshot needs."""
    settings = _settings(config, None, sets)
    maintenance, versions = (
        load("stream_jobs.lake.delta.maintenance"),
        load("stream_jobs.lake.delta.snapshots"),
    )
    for name in (
        [t["table"] for t in versions.tables(settings)] if table is None else [_known(table)]
    ):
        typer.echo(f"{name}: {maintenance.vacuum(settings, name)} files deleted")


@app.command()
def snapshot(
    overrides: Overrides = None,
    config: Config = None,
    sets: Set = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Keep these versions until `delete-snapshot`."),
    ] = None,
) -> None:
    """Print the versions of all tables now, as JSON, which `sql --at` accepts."""
    settings = _settings(config, overrides, sets)
    typer.echo(json.dumps(load("stream_jobs.lake.delta.snapshots").take_snapshot(settings, name)))


@app.command()
def snapshots(overrides: Overrides = None, config: Config = None, sets: Set = None) -> None:
    """List the named snapshots."""
    settings = _settings(config, overrides, sets)
    for name, found in sorted(
        load("stream_jobs.lake.delta.snapshots").named_snapshots(settings).items()
    ):
        typer.echo(
            f"{name}  "
            f"{found.get('at', '') if isinstance(found, dict) else f'can not be read: {found}'}"
        )


@app.command()
def delete_snapshot(
    name: Annotated[str, typer.Argument(help="Name of the snapshot.")],
    overrides: Overrides = None,
    config: Config = None,
    sets: Set = None,
) -> None:
    """Delete a named snapshot; its files may then be deleted."""
    settings = _settings(config, overrides, sets)
    load("stream_jobs.lake.delta.snapshots").delete_snapshot(settings, name)


def _known(table: str) -> str:
    names = load("stream_jobs.lake.tables.catalog").catalog()
    if table not in names:
        fail(f"no table {table}; there are {', '.join(names)}", 2)
    return table

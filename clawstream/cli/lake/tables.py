"""`clawstream tables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from clawstream.cli.common_options import (
    Config,
    Form,
    Yes,
    cluster_of,
    command,
    fail,
    group,
    load,
    names_and_overrides,
    print_json,
    settings_of,
)
from clawstream.query.result_format import as_text
from clawstream.schemas.ids import check_run_id
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake import erasure as erasures
from clawstream.stream_jobs.lake.delta import maintenance, snapshots
from clawstream.stream_jobs.lake.delta import repair as repairs
from clawstream.stream_jobs.lake.tables.catalog import catalog

app = group()
Table = Annotated[str, typer.Argument(help="Table.")]


def _print(rows: Sequence[Mapping[str, Any]], output: str) -> None:
    if output == "json":
        print_json(list(rows))
    elif rows:
        typer.echo(as_text(list(rows[0]), [list(row.values()) for row in rows]))


@command(app)
def repair(
    table: Table,
    settings: Settings,
    check: Annotated[
        bool, typer.Option("--check", help="Only show which files can't be read.")
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
    if check:
        damage = repairs.check(settings, table)
        typer.echo("\n".join(damage) or f"{table}: every file can be read")
        raise SystemExit(1 if damage else 0)
    done = repairs.repair(settings, table, cluster_of(settings), accept_loss)
    for line in done.damage:
        typer.echo(line)
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


def _tables(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE]... [a.b=c]...", help="Tables; default: all. Settings."),
    ] = None,
    config: Config = None,
) -> tuple[list[str], Settings]:
    names, overrides = names_and_overrides(words)
    for name in names:
        if name not in catalog():
            fail(f"no table {name}; there are {', '.join(catalog())}", 2)
    return names, settings_of(config, overrides)


@command(app, tables=_tables)
def compact(tables: tuple[list[str], Settings]) -> None:
    """Merge small files; delete expired rows and unneeded files. The writer may keep running."""
    names, settings = tables
    for done in maintenance.maintain(settings, _existing(names, settings)):
        deferred = f"; the rest next time: {done.deferred}" if done.deferred else ""
        typer.echo(
            f"{done.table}: {done.merged_files} files into {done.made_files}, "
            f"{done.deleted_rows} old rows and {done.deleted_files} old files deleted{deferred}"
        )


def _existing(names: Sequence[str], settings: Settings) -> Sequence[str]:
    return names or [t["table"] for t in snapshots.tables(settings)]


@command(app, "list", tables=_tables)
def tables_list(
    tables: tuple[list[str], Settings],
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Newest commits of a named table.")
    ] = 20,
    output: Form = "table",
) -> None:
    """Rows, files, bytes, version and newest row of each table; of named ones the commits."""
    names, settings = tables
    if not names:
        _print(snapshots.tables(settings), output)
    for name in names:
        _print(snapshots.history(settings, name, limit), output)


@command(app)
def erase(
    settings: Settings,
    trajectory: Annotated[
        list[str] | None,
        typer.Option("--trajectory", help="A trajectory or session key. May be repeated."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", "-r", help="Run of the trajectories; default: run_id, with --where all runs."
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", help="All trajectories of which a row of --table fulfils this."),
    ] = None,
    of: Annotated[
        str | None, typer.Option("--table", help="Table of --where; default: steps.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Erase trajectories: rows, blobs and former versions. Without --yes it only counts."""
    if not trajectory and not where:
        fail("say which: --trajectory KEY, or --where CONDITION", 2)
    if of is not None and not where:
        fail("--table says where --where looks: --trajectory goes without it", 2)
    keys = {(run or settings.run_id, key) for key in trajectory or ()}
    if where:
        keys |= _keys_where(settings, of or "steps", where, run)
    erasure = erasures.Erasure(settings, keys)
    found = list(erasure.find())
    for rows in found:
        until = rows.kept_until and f"{rows.kept_until:%Y-%m-%d %H:%M} UTC"
        log = f"{rows.topic} has them until {until or '`clawstream topics trim` removes them'}"
        typer.echo(f"{rows.table}: {rows.rows} rows; {log}")
        if rows.table == erasures.LETTERS:
            typer.echo(f"{rows.table}: of every run, where a letter has only its key")
    runs = ", ".join(sorted({run_id for run_id, _ in keys})) or "no run"
    what = f"{len(keys)} trajectories of {runs}, {sum(rows.rows for rows in found)} rows"
    if yes:
        typer.echo(f"erased {what}, {erasure.run()} blobs")
    else:
        typer.echo(f"{what}, {len(erasure.blobs())} blobs would be erased: add --yes to erase them")


def _keys_where(
    settings: Settings, table: str, where: str, run: str | None
) -> set[tuple[str, str]]:
    """Return the trajectories of the rows that fulfil a condition; print how many have none."""
    columns = "run_id, trajectory_key"
    of_run = "" if run is None else f" and run_id = '{check_run_id(run)}'"
    query = (
        f"select {columns}, count(*) as n from {table} where ({where}){of_run} group by {columns}"
    )
    with load("clawstream.query.sandbox").answer(settings, query) as batches:
        rows = [row for batch in batches for row in batch.to_pylist()]
    if keyless := sum(row["n"] for row in rows if row["trajectory_key"] is None):
        typer.echo(f"{table}: {keyless} rows belong to no trajectory and stay")
    return {
        (row["run_id"], row["trajectory_key"]) for row in rows if row["trajectory_key"] is not None
    }


@command(app)
def snapshot(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME] [a.b=c]...", help="A name; settings.")
    ] = None,
    config: Config = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete it; its files may then be deleted.")
    ] = False,
) -> None:
    """Keep the present versions of all tables under a name, for --as-of; without one list them."""
    names, overrides = names_and_overrides(words)
    settings = settings_of(config, overrides)
    if len(names) > 1 or (delete and not names):
        fail("snapshot takes one name", 2)
    if delete:
        snapshots.delete_snapshot(settings, names[0])
    elif names:
        print_json(snapshots.take_snapshot(settings, names[0]))
    else:
        for name, kept in sorted(snapshots.named_snapshots(settings).items()):
            at = kept.get("at", "") if isinstance(kept, dict) else f"can not be read: {kept}"
            typer.echo(f"{name}  {at}")

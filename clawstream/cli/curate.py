"""`clawstream curate`."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from clawstream.cli.common_options import (
    Config,
    Form,
    Overrides,
    cluster_of,
    fail,
    load,
    settings_of,
)
from runtime.user import current_user

EXAMPLES = 5


def curate(
    overrides: Overrides = None,
    config: Config = None,
    where: Annotated[
        str, typer.Option("--where", "-w", help='SQL condition, e.g. "quality < 0.3".')
    ] = "",
    of: Annotated[
        Literal["trajectories", "steps"],
        typer.Option("--of", help="What is marked, and the view that has the columns."),
    ] = "trajectories",
    run: Annotated[str | None, typer.Option("--run", "-r", help="Of this run only.")] = None,
    quality: Annotated[
        float | None, typer.Option("--quality", help="In [0, 1]; stands above what rules say.")
    ] = None,
    trainable: Annotated[
        Literal["true", "false"] | None, typer.Option("--trainable", help="May be trained.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", help="A label; those of before go. Repeat it for several."),
    ] = None,
    note: Annotated[str | None, typer.Option("--note", help="Why.")] = None,
    by: Annotated[str | None, typer.Option("--by", help="Who; default you@this-host.")] = None,
    send: Annotated[bool, typer.Option("--send", help="Do it; without it only counts.")] = False,
    form: Form = "table",
) -> None:
    """Mark what a query over the lake finds. Counts, and marks nothing, until --send."""
    if not where:
        fail('--where is missing: say which, e.g. --where "quality < 0.3"', 2)
    settings = settings_of(config, overrides)
    module, sql = load("clawstream.query.curation"), load("clawstream.query.connection")
    try:
        mark = module.CurationMark(
            by or current_user(),
            quality,
            None if trainable is None else trainable == "true",
            tuple(tag) if tag else None,
            note,
        )
    except module.InvalidCurationMark as e:
        fail(str(e), 2)
    connection = sql.connect(settings)
    try:
        found = module.targets(connection, of, where, run)
    finally:
        connection.close()
    sent = module.send(settings, cluster_of(settings), mark, found) if send else 0
    late = sum(t.admitted for t in found)
    if form == "json":
        typer.echo(
            json.dumps(
                {
                    "found": len(found),
                    "admitted": late,
                    "sent": sent,
                    "targets": [t._asdict() for t in found],
                }
            )
        )
        return
    for target in found[:EXAMPLES]:
        admitted = " (admitted already)" if target.admitted else ""
        typer.echo(f"  {target.step_id or target.trajectory_id}{admitted}")
    if len(found) > EXAMPLES:
        typer.echo(f"  and {len(found) - EXAMPLES} more")
    told = f"{len(found)} {of}, {late} of them admitted already, too late for training"
    typer.echo(f"{told}; {f'{sent} marked' if send else 'none marked: say --send'}")

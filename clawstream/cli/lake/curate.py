"""`clawstream curate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clawstream.cli.common_options import By, Form, Run, cluster_of, fail, load, print_json
from clawstream.runtime.user import current_user

if TYPE_CHECKING:
    from clawstream.schemas.settings import Settings

EXAMPLES = 5


def curate(
    settings: Settings,
    where: Annotated[
        str, typer.Option("--where", "-w", help='SQL condition, e.g. "quality < 0.3".')
    ] = "",
    of: Annotated[
        Literal["trajectories", "steps"],
        typer.Option("--of", help="What is marked, and the view that has the columns."),
    ] = "trajectories",
    run: Run = None,
    quality: Annotated[
        float | None, typer.Option("--quality", help="In [0, 1]; overrides that of quality rules.")
    ] = None,
    trainable: Annotated[
        Literal["true", "false"] | None, typer.Option("--trainable", help="May be trained.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", help="A label; replaces earlier ones. May be repeated."),
    ] = None,
    note: Annotated[str | None, typer.Option("--note", help="Why.")] = None,
    by: By = None,
    send: Annotated[bool, typer.Option("--send", help="Do it; without it only counts.")] = False,
    form: Form = "table",
) -> None:
    """Mark the trajectories or steps that a query over the lake finds; only counts until --send."""
    if not where:
        fail('--where is missing: say which, e.g. --where "quality < 0.3"', 2)
    module, sql = load("clawstream.query.curation"), load("clawstream.query.connection")
    marks, errors = load("clawstream.inspector.marks.mark"), load("clawstream.inspector.errors")
    try:
        mark = marks.Mark(
            by or current_user(),
            quality,
            None if trainable is None else trainable == "true",
            tuple(tag) if tag else None,
            note,
        )
    except errors.InvalidMark as e:
        fail(str(e), 2)
    connection = sql.connect(settings)
    try:
        found = module.targets(connection, of, where, run)
    finally:
        connection.close()
    sent = module.send(settings, cluster_of(settings), mark, found) if send else 0
    late = sum(t.admitted for t in found)
    if form == "json":
        targets = [t._asdict() for t in found]
        print_json({"found": len(found), "admitted": late, "sent": sent, "targets": targets})
        return
    for target in found[:EXAMPLES]:
        admitted = " (admitted already)" if target.admitted else ""
        typer.echo(f"  {target.step_id or target.trajectory_id}{admitted}")
    if len(found) > EXAMPLES:
        typer.echo(f"  and {len(found) - EXAMPLES} more")
    done = f"{sent} marked" if send else "none marked: say --send"
    typer.echo(f"{len(found)} {of}, {late} of them admitted already, too late for training; {done}")

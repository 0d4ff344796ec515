"""`clawstream export`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clawstream.cli.common_options import AsOf, Form, load, print_json

if TYPE_CHECKING:
    from clawstream.schemas.settings import Settings

FormatName = Literal["jsonl", "parquet", "trl"]


def export(
    target: Annotated[Path, typer.Argument(help="Directory to create.")],
    settings: Settings,
    to: Annotated[FormatName, typer.Option("--to", help="Format of the files.")] = "jsonl",
    where: Annotated[
        str, typer.Option("--where", "-w", help='SQL condition, e.g. "reward > 0.5 and trainable".')
    ] = "",
    at: AsOf = None,
    output: Form = "table",
) -> None:
    """Write trajectories of the lake for other tools, with the Delta versions they came from."""
    provenance, counts = load("clawstream.export.export").export(settings, to, target, where, at)
    if output == "json":
        print_json({**asdict(provenance), "counts": asdict(counts)}, indent=1)
        return
    typer.echo(
        f"{counts.rows} rows of {counts.trajectories} trajectories, {counts.trained_tokens} of "
        f"{counts.tokens} tokens to train"
    )
    for reason, number in sorted(counts.skipped.items()):
        typer.echo(f"  skipped {number}: {reason}")
    typer.echo(f"Delta versions, counts and checksums: {target / 'provenance.json'}")

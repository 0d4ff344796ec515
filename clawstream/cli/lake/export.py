"""`clawstream export`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clawstream.cli.common_options import Form, fail, load, print_json

if TYPE_CHECKING:
    from clawstream.schemas.settings import Settings

FormatName = Literal["jsonl", "parquet", "huggingface", "trl", "verl", "prime-rl"]


def export(
    target: Annotated[Path, typer.Argument(help="Directory to create.")],
    settings: Settings,
    to: Annotated[FormatName, typer.Option("--to", help="Format of the files.")] = "jsonl",
    where: Annotated[
        str, typer.Option("--where", "-w", help='SQL condition, e.g. "reward > 0.5 and trainable".')
    ] = "",
    at: str | None = None,
    rows_per_file: Annotated[
        int | None, typer.Option("--rows-per-file", min=1, help="Of verl and prime-rl.")
    ] = None,
    pad_token_id: Annotated[
        int | None, typer.Option("--pad-token-id", min=0, help="Of verl; default 0.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", help="Of prime-rl, for steps that state none; default 1."),
    ] = None,
    output: Form = "table",
) -> None:
    """Write trajectories of the lake for other tools, with the Delta versions they came from."""
    module, formats = load("clawstream.export.export"), load("clawstream.export.formats.registry")
    given = {
        "rows_per_file": rows_per_file, "pad_token_id": pad_token_id, "temperature": temperature
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    for name in options.keys() - set(formats.FORMATS[to].options):
        fail(f"--{name.replace('_', '-')} does not apply to --to {to}", 2)
    provenance, counts = module.export(settings, to, target, where, at, options)
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

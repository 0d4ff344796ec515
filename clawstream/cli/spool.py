"""`clawstream spool`."""

from __future__ import annotations

from typing import Annotated

import typer

from clawstream.cli.common_options import cluster_of, command, group
from clawstream.ops.spool_drain import drain
from clawstream.schemas.settings import Settings

app = group()


@command(app, "drain")
def spool_drain(
    settings: Settings,
    gateway_id: Annotated[
        str | None, typer.Option("--gateway-id", help="Of this gateway only.")
    ] = None,
) -> None:
    """Send spooled records that are too old or damaged to be sent automatically.

    Each record is sent only if the lake does not have it.
    """
    cluster_of(settings)
    for done in drain(settings, gateway_id):
        runs = ", runs: it sends the other segments itself" if done.runs else ""
        typer.echo(f"{done.gateway_id}: {done.sent} sent, {done.in_lake} in the lake already{runs}")
        for segment in done.damaged:
            typer.echo(str(segment))

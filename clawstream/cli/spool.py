"""`clawstream spool`."""

from __future__ import annotations

from typing import Annotated

import typer

from clawstream.cli.common_options import Config, Overrides, cluster_of, group, load, settings_of

app = group("What gateways could not send.")


@app.command("drain")
def spool_drain(
    overrides: Overrides = None,
    config: Config = None,
    gateway_id: Annotated[
        str | None, typer.Option("--gateway-id", help="Of this gateway only.")
    ] = None,
) -> None:
    """Send spooled records that are too old or damaged to be sent automatically.

    Each record is sent only if the lake does not have it.
    """
    settings = settings_of(config, overrides)
    spool, lake = load("clawstream.ops.spool_drain"), load("stream_jobs.lake.lookup")
    cluster_of(settings)
    for done in spool.drain(settings, lake.in_lake, lake.check_not_behind, gateway_id):
        runs = ", runs: it sends the other segments itself" if done.runs else ""
        typer.echo(f"{done.gateway_id}: {done.sent} sent, {done.in_lake} in the lake already{runs}")
        for left in done.damaged:
            typer.echo(str(left))

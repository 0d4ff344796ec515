"""`clawstream keys`."""

from __future__ import annotations

from typing import Annotated

import typer

from clawstream.cli.common_options import command, group
from gateway.auth import key_commands
from schemas.settings import Settings

app = group("API keys of the gateway.")


@command(app, "create")
def keys_create(
    settings: Settings,
    name: Annotated[str, typer.Option("--name", help="Who or what will use it.")],
    scope: Annotated[
        list[str], typer.Option("--scope", help="agent, reward, curate or admin; may be repeated.")
    ],
    run: Annotated[
        str | None, typer.Option("--run", help="The run of everything written with it.")
    ] = None,
    days: Annotated[
        float | None, typer.Option("--days", help="Days until it expires; default: never.")
    ] = None,
    calls_per_minute: Annotated[
        int | None, typer.Option(help="Model calls a minute, at each gateway.")
    ] = None,
    calls_at_once: Annotated[
        int | None, typer.Option(help="Model calls at once, at each gateway.")
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(help="Tokens a day (UTC), prompts and replies, at each gateway.")
    ] = None,
) -> None:
    """Create an API key and print it, this once: only its hash is kept."""
    limits = (calls_per_minute, calls_at_once, tokens_per_day)
    typer.echo(key_commands.create(settings, name, scope, run, days, *limits))


@command(app, "list")
def keys_list(settings: Settings) -> None:
    """Names, scopes and runs of all API keys."""
    typer.echo(key_commands.listing(settings))


@command(app, "revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(help="Its name or id.")], settings: Settings
) -> None:
    """Revoke an API key; gateways refuse it a second later."""
    typer.echo(key_commands.revoke(settings, name))

"""`clawstream keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clawstream.cli.common_options import Config, Overrides, group, load, settings_of

app = group("API keys of the gateway.")


def _keys_command(
    function: str, config: Path | None, overrides: list[str] | None, **given: object
) -> None:
    """Print what a function of the gateway's key commands says."""
    settings = settings_of(config, overrides)
    keys = load("gateway.auth.key_commands")
    typer.echo(getattr(keys, function)(settings, **given))


@app.command("create")
def keys_create(
    name: Annotated[str, typer.Option("--name", help="Who or what will use it.")],
    scope: Annotated[
        list[str], typer.Option("--scope", help="agent, reward, curate or admin; may be repeated.")
    ],
    run: Annotated[
        str | None, typer.Option("--run", help="The run of everything written with it.")
    ] = None,
    days: Annotated[
        float | None,
        typer.Option("--days", help="How long it is good for; default: until revoked."),
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
    overrides: Overrides = None,
    config: Config = None,
) -> None:
    """Make an API key and print it, this once: only its hash is kept."""
    limits = {
        "calls_per_minute": calls_per_minute,
        "calls_at_once": calls_at_once,
        "tokens_per_day": tokens_per_day,
    }
    _keys_command(
        "create", config, overrides, name=name, scopes=scope, run_id=run, days=days, **limits
    )


@app.command("list")
def keys_list(overrides: Overrides = None, config: Config = None) -> None:
    """Names, scopes and runs of all API keys."""
    _keys_command("listing", config, overrides)


@app.command("revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(help="Its name or id.")],
    overrides: Overrides = None,
    config: Config = None,
) -> None:
    """Forget an API key; gateways refuse it a second later."""
    _keys_command("revoke", config, overrides, name=name)

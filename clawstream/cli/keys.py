"""`clawstream keys`."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from clawstream.cli.common_options import command, group
from clawstream.gateway.auth.api_keys import create_key, read_keys, revoke_key, scope_of
from clawstream.gateway.errors import Unprocessable
from clawstream.schemas.settings import Settings
from clawstream.text_table import text_table

app = group()
DAY_S = 86400.0
HEAD = ("NAME", "ID", "SCOPES", "RUN", "CREATED", "EXPIRES", "CALLS/MIN", "AT ONCE", "TOKENS/DAY")


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
    if days is not None and not 0 < days <= 36500:
        raise Unprocessable(f"days: {days:g} is not in (0, 36500]", "days")
    expires_at = None if days is None else int(time.time() + days * DAY_S)
    scopes = [scope_of(text) for text in scope]
    limits = (calls_per_minute, calls_at_once, tokens_per_day)
    typer.echo(create_key(settings.api_keys_file, name, scopes, run, expires_at, *limits))


@command(app, "list")
def keys_list(settings: Settings) -> None:
    """Names, scopes and runs of all API keys."""
    keys = read_keys(settings.api_keys_file)
    if not keys:
        typer.echo(f"no API keys in {settings.api_keys_file}")
        return
    rows = [
        (
            *(k.name, k.key_id, ",".join(k.scopes), k.run_id),
            *(_day(k.created_at), _day(k.expires_at)),
            *(k.calls_per_minute, k.calls_at_once, k.tokens_per_day),
        )
        for k in keys
    ]
    typer.echo(text_table(HEAD, [[cell or "-" for cell in row] for row in rows]))


def _day(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


@command(app, "revoke")
def keys_revoke(
    name: Annotated[str, typer.Argument(help="Its name or id.")], settings: Settings
) -> None:
    """Revoke an API key; gateways refuse it a second later."""
    key = revoke_key(settings.api_keys_file, name)
    typer.echo(f"revoked {key.name} ({key.key_id})")

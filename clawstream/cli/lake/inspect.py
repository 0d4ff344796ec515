"""`clawstream inspect`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from clawstream.cli.common_options import Config, Overrides, load, names_and_overrides, settings_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from inspector.live.feed import Live
    from inspector.web.app import Parts
    from schemas.settings import Settings


def inspect(
    words: Overrides = None,
    config: Config = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port.")] = 8300,
) -> None:
    """Show runs, trajectories and tokens in the browser, live.

    A word without `=` is the data directory: `clawstream inspect runs/demo`. Pages need an API key
    of all runs with scope curate; when there are no keys, one is printed that lasts as long as this
    process.
    """
    names, overrides = names_and_overrides(words)
    settings = settings_of(config, [*overrides, *(f"data_dir={name}" for name in names[-1:])])
    main, lifecycle = load("inspector.main"), load("runtime.process.lifecycle")
    parts, live, key = parts_of(settings)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    typer.echo(f"inspector: {url}" + (f"  key: {key}" if key else ""), err=True)

    async def serve(_: Settings, stop: asyncio.Event) -> None:
        await main.serve(parts, live, host, port, stop)

    lifecycle.run_async("inspector", settings, serve)


def parts_of(settings: Settings) -> tuple[Parts, Live, str | None]:
    """Return the parts of the application, its live tail, and the key to print, if any."""
    from clawstream.export.chat import chat_of
    from clawstream.query.live_lake import Copy, LiveLake
    from clawstream.query.token_texts import TokenTexts
    from inspector.live.feed import Live, follower
    from inspector.queries.lake import COPIES
    from inspector.web.app import Parts
    from runtime.topics.records import cluster_of

    lake = LiveLake(settings, {name: Copy(*copy) for name, copy in COPIES.items()})
    may_read, key = _keys(settings)
    live = Live(lake, follower(cluster_of(settings), settings))
    gateway = settings.gateway
    url = gateway.public_url or f"http://127.0.0.1:{gateway.port}{gateway.base_path}"
    texts = TokenTexts(lake.rows, gateway.tokenizer_path)
    return Parts(lake, live, may_read, chat_of, texts, url), live, key


def _keys(settings: Settings) -> tuple[Callable[[str], bool], str | None]:
    """Return the check of a key, and a key of this process when the gateway has none."""
    from gateway.auth.api_keys import PREFIX, KeyRing, digest_of

    ring = KeyRing(settings.api_keys_file)
    own = None if len(ring) else PREFIX + secrets.token_urlsafe(32)
    expected = digest_of(own) if own else None

    def may_read(key: str) -> bool:
        ring.reload()
        digest = digest_of(key)
        found = ring.by_digest(digest)
        if found is None:
            return digest == expected
        return found.may("curate") and found.run_id is None

    return may_read, own

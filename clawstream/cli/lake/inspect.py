"""`clawstream inspect`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from clawstream.cli.common_options import (
    Config,
    Overrides,
    fail,
    load,
    names_and_overrides,
    settings_of,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from clawstream.inspector.live.feed import Live
    from clawstream.inspector.web.access import User
    from clawstream.inspector.web.app import Parts
    from clawstream.schemas.settings import Settings


def inspect(
    words: Overrides = None,
    config: Config = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port.")] = 8300,
) -> None:
    """Show runs, trajectories and tokens in the browser, live.

    A word without `=` is the data directory: `clawstream inspect runs/demo`. Pages need an API key
    of all runs with scope curate; rewards need the scope reward, policies the scope admin. When
    there are no keys, one is printed that lasts as long as this process.
    """
    names, overrides = names_and_overrides(words)
    if len(names) > 1:
        fail(f"inspect takes one data directory, not {len(names)}: {' '.join(names)}", 2)
    settings = settings_of(config, [*overrides, *(f"data_dir={name}" for name in names)])
    named = bool(names) or any(word.startswith("data_dir=") for word in overrides)
    if named and settings.lake.uri is None and not settings.data_dir.is_dir():
        fail(f"there is no data directory {settings.data_dir}", 2)
    main, lifecycle = (
        load("clawstream.inspector.main"),
        load("clawstream.runtime.process.lifecycle"),
    )
    parts, live, key = parts_of(settings)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    typer.echo(f"inspector: {url}" + (f"  key: {key}" if key else ""), err=True)

    async def serve(_: Settings, stop: asyncio.Event) -> None:
        await main.serve(parts, live, host, port, stop)

    lifecycle.run_async("inspector", settings, serve)


def parts_of(settings: Settings) -> tuple[Parts, Live, str | None]:
    """Return the parts of the application, its live tail, and the key to print, if any."""
    from clawstream.inspection.operations import Operations
    from clawstream.inspection.policies import RunPolicies
    from clawstream.inspection.sandboxed_sql import SandboxedSql
    from clawstream.inspection.whole_chats import whole_chats
    from clawstream.inspector.live.feed import Follower, Live
    from clawstream.inspector.marks.writer import MarkWriter, producer_of
    from clawstream.inspector.metrics import PageMetrics
    from clawstream.inspector.operations.watcher import Watcher
    from clawstream.inspector.queries.activity import Activity
    from clawstream.inspector.queries.lake import COPIES
    from clawstream.inspector.web.app import Parts
    from clawstream.query.live_lake import LiveLake
    from clawstream.query.token_texts import TokenTexts
    from clawstream.runtime.blob_store import BlobStore
    from clawstream.runtime.process.metrics import add_process_metrics
    from clawstream.runtime.topics.records import cluster_of

    lake = LiveLake(settings, COPIES)
    lake.start()
    user_of, key = _keys(settings)
    cluster, gateway, topics = cluster_of(settings), settings.gateway, settings.kafka.topics
    follower = Follower(cluster, settings)
    live = Live(lake, follower)
    url = gateway.public_url or f"http://127.0.0.1:{gateway.port}{gateway.base_path}"
    metrics = PageMetrics()
    add_process_metrics(metrics.registry, settings)
    blobs = BlobStore(settings.blob_uri, gateway.blob_options)
    parts = Parts(
        lake, live, user_of, whole_chats(blobs.get),
        TokenTexts(lake.rows, gateway.tokenizer_path), url,
        marks=MarkWriter(topics.rewards, producer_of(cluster, topics), follower.is_connected),
        rewards=(gateway.reward_min, gateway.reward_max),
        policies=RunPolicies(settings, cluster, lake, follower.is_connected),
        sql=SandboxedSql(settings),
        operations=Watcher(Operations(settings, cluster_of(settings))),
        activity=Activity(lake), metrics=metrics,
    )  # fmt: skip
    return parts, live, key


def _keys(settings: Settings) -> tuple[Callable[[str], User | None], str | None]:
    """Return what finds the user of a key, and a key of this process when the gateway has none."""
    from clawstream.gateway.auth.api_keys import PREFIX, SCOPES, KeyRing, digest_of
    from clawstream.inspector.web.access import User
    from clawstream.runtime.user import current_user

    ring = KeyRing(settings.api_keys_file)
    own = None if len(ring) else PREFIX + secrets.token_urlsafe(32)
    expected = digest_of(own) if own else None

    def user_of(key: str) -> User | None:
        ring.reload()
        digest = digest_of(key)
        found = ring.by_digest(digest)
        if found is None:
            return User(current_user(), frozenset(SCOPES)) if digest == expected else None
        may_read = found.may("curate") and found.run_id is None
        return User(found.name, frozenset(found.scopes)) if may_read else None

    return user_of, own

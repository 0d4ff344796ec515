"""`clawstream broker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clawstream.cli.common_options import Config, Overrides, command, fail, group, settings_of

if TYPE_CHECKING:
    from clawstream.schemas.settings import Settings

app = group()
Nodes = Annotated[
    int | None, typer.Option("--nodes", help="1, 3 or 5: the same as broker.nodes=N.")
]


def _with_nodes(overrides: list[str] | None, nodes: int | None) -> list[str]:
    return [*(overrides or ()), *([f"broker.nodes={nodes}"] if nodes is not None else [])]


@app.command("run")
def broker_run(overrides: Overrides = None, config: Config = None, nodes: Nodes = None) -> None:
    """Run the broker in the foreground, for a supervisor or a container."""
    from clawstream.runtime.broker.foreground import run_foreground
    from clawstream.runtime.logs import configure

    settings = settings_of(config, _with_nodes(overrides, nodes))
    configure("broker", settings.log_level)
    raise SystemExit(run_foreground(settings.broker, settings.broker_dir))


@app.command("prepare")
def broker_prepare(overrides: Overrides = None, config: Config = None) -> None:
    """Fetch Kafka's jars and create the start cache, which halves the CPU time of a start."""
    from clawstream.runtime.broker.jars import ensure_jars, find_java
    from clawstream.runtime.broker.start_cache import make_start_cache, start_cache

    settings = settings_of(config, overrides).broker
    cache = start_cache(find_java(settings.java), ensure_jars(settings.jars_dir))
    made = make_start_cache(cache)
    typer.echo(f"Kafka's jars: {cache.jars_dir}")
    typer.echo(f"start cache: {cache.path if made else 'another process makes it'}")


@app.command("start")
def broker_start(
    overrides: Overrides = None,
    config: Config = None,
    nodes: Nodes = None,
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="Give up after this many seconds; default: never."),
    ] = None,
) -> None:
    """Start the broker in the background and wait until it serves.

    After an unclean shutdown it recovers its logs first.
    """
    from math import inf

    from clawstream.runtime.broker.embedded import start

    settings = settings_of(config, _with_nodes(overrides, nodes))
    patience_s = inf if wait is None else wait
    for node in start(
        settings.broker,
        settings.broker_dir,
        patience_s=patience_s,
        report=lambda text: typer.echo(text, err=True),
    ):
        typer.echo(f"node {node.node}: 127.0.0.1:{node.port}, pid {node.pid}")


@command(app, "stop")
def broker_stop(settings: Settings) -> None:
    """Stop the broker that was started in the background."""
    from clawstream.runtime.broker.embedded import stop

    pids = stop(settings.broker_dir)
    typer.echo(
        f"stopped {', '.join(map(str, pids))}"
        if pids
        else f"no broker runs on {settings.broker_dir}"
    )


@command(app, "status")
def broker_status(settings: Settings) -> None:
    """Show which nodes run; exit code 1 when none is ready."""
    from clawstream.runtime.broker.embedded import status

    nodes = status(settings.broker_dir)
    for node in nodes:
        typer.echo(
            f"node {node.node}: 127.0.0.1:{node.port}, pid {node.pid or '-'}, "
            f"{'ready' if node.ready else 'not ready'}"
        )
    if not any(node.ready for node in nodes):
        fail(f"no broker is ready on {settings.broker_dir}")

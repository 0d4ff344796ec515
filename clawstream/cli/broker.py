"""`clawstream broker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from clawstream.cli.common_options import command, fail, group

if TYPE_CHECKING:
    from clawstream.schemas.settings import Settings

app = group()


@command(app, "run")
def broker_run(settings: Settings) -> None:
    """Run the broker in the foreground until SIGTERM or Ctrl-C."""
    from clawstream.runtime.broker.foreground import run_foreground
    from clawstream.runtime.logs import configure

    configure("broker", settings.log_level)
    raise SystemExit(run_foreground(settings.broker, settings.broker_dir))


@command(app, "prepare")
def broker_prepare(settings: Settings) -> None:
    """Fetch Kafka's jars, and start and stop a broker once: later starts take half the CPU time.

    That broker is a cluster of one node on this machine, with an empty data directory and the port
    of the settings.
    """
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from clawstream.runtime.broker.embedded import broker_of

    alone = settings.broker.model_copy(update={"hosts": (), "advertised_host": "127.0.0.1"})
    with TemporaryDirectory() as directory, broker_of(alone, Path(directory)):
        typer.echo("Kafka's jars are here, and a broker starts")


@command(app, "status")
def broker_status(settings: Settings) -> None:
    """Show whether the node of this machine runs; exit code 1 when it is not ready."""
    from clawstream.runtime.broker.embedded import status

    node = status(settings.broker_dir)
    if node is not None:
        typer.echo(
            f"node {node.node}: 127.0.0.1:{node.port}, pid {node.pid or '-'}, "
            f"{'ready' if node.ready else 'not ready'}"
        )
    if node is None or not node.ready:
        fail(f"no broker is ready on {settings.broker_dir}")

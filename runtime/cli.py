"""The command line. Imports nothing heavy until a command runs: `clawstream --help` answers at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from schemas.settings import Settings

Words = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings, e.g. trainer.lr=1e-6.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]

app = typer.Typer(
    name="clawstream",
    help="The data foundation of agentic reinforcement learning, as an event stream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich alone would double the start-up
    context_settings={"help_option_names": ["-h", "--help"]},
)
broker_app = typer.Typer(help="The embedded Apache Kafka.", no_args_is_help=True, rich_markup_mode=None)
topics_app = typer.Typer(help="Kafka topics.", no_args_is_help=True, rich_markup_mode=None)
jobs_app = typer.Typer(help="Stream jobs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(broker_app, name="broker")
app.add_typer(topics_app, name="topics")
app.add_typer(jobs_app, name="jobs")


def _settings(config: Path | None, words: list[str] | None) -> Settings:
    from runtime.config import load
    from schemas.errors import SettingsError

    try:
        return load(config, words or ())
    except SettingsError as e:
        _fail(str(e), 2)


def _fail(message: str, code: int = 1) -> NoReturn:
    sys.stderr.write(f"clawstream: {message}\n")
    raise SystemExit(code)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Errors that a user can do something about, as one line without a traceback."""
    from runtime.errors import PlumbingError

    try:
        yield
    except PlumbingError as e:
        _fail(str(e))


def _run(target: str, config: Path | None, words: list[str] | None) -> None:
    """Call `module:function` with the settings. By name, so that no process imports another."""
    settings = _settings(config, words)
    module, _, function = target.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is not None and e.name.partition(".")[0] == module.partition(".")[0]:
            raise
        _fail(f"{module} needs the package {e.name}, which is not installed: see docs/install.md")
    getattr(loaded, function)(settings)


@app.command()
def up(words: Words = None, config: Config = None) -> None:
    """Run everything on this machine until Ctrl-C, then stop in order."""
    _run("runtime.up:run", config, words)


@app.command()
def demo(words: Words = None, config: Config = None) -> None:
    """Make a tiny model, let an agent use it, train it until it has learned the task, and report."""
    _run("demo.main:main", config, words)


@app.command()
def gateway(words: Words = None, config: Config = None) -> None:
    """Serve agents: their base_url points here."""
    _run("gateway.main:main", config, words)


@jobs_app.command("assemble")
def jobs_assemble(words: Words = None, config: Config = None) -> None:
    """Join steps with rewards into trajectories and candidates."""
    _run("stream_jobs.app:run_assemble", config, words)


@jobs_app.command("reward")
def jobs_reward(words: Words = None, config: Config = None) -> None:
    """Compute rule rewards of closed trajectories."""
    _run("stream_jobs.app:run_reward", config, words)


@app.command()
def admit(words: Words = None, config: Config = None) -> None:
    """Fold candidates into groups and ready batches."""
    _run("stream_jobs.admission:main", config, words)


@app.command()
def lake(words: Words = None, config: Config = None) -> None:
    """Write every topic to Delta Lake, each record once."""
    _run("stream_jobs.lake:main", config, words)


@app.command()
def train(words: Words = None, config: Config = None) -> None:
    """Learn from ready batches and publish weight versions."""
    _run("trainer.loop:main", config, words)


@app.command()
def rollout(words: Words = None, config: Config = None) -> None:
    """Run vLLM and load each weight version into it without restart."""
    _run("rollout.worker:main", config, words)


@app.command()
def lag(words: Words = None, config: Config = None) -> None:
    """How far every consumer group is behind, in records."""
    settings = _settings(config, words)
    from runtime.lag import format_lag
    from runtime.lag import lag as group_lag
    from runtime.records import cluster_of

    with _plain_errors():
        typer.echo(format_lag(group_lag(cluster_of(settings), settings)))


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="DuckDB SQL over the tables of the lake.")],
    words: Words = None,
    config: Config = None,
    output: Annotated[str, typer.Option("--format", "-f", help="table, json or csv.")] = "table",
) -> None:
    """Ask the lake."""
    settings = _settings(config, words)
    module = importlib.import_module("stream_jobs.sql")
    try:
        typer.echo(module.run_sql(settings, query, output))
    except module.SqlError as e:
        _fail(str(e))


@topics_app.command("create")
def topics_create(words: Words = None, config: Config = None) -> None:
    """Make every topic that is not there yet, and announce the schemas."""
    settings = _settings(config, words)
    from runtime.records import cluster_of, create_topics

    with _plain_errors():
        made = create_topics(cluster_of(settings), settings)
    typer.echo("\n".join(f"made {name}" for name in made) or "all topics are there")


@topics_app.command("list")
def topics_list(words: Words = None, config: Config = None) -> None:
    """Topics with their ids, partitions and offsets."""
    settings = _settings(config, words)
    from runtime.records import cluster_of

    with _plain_errors():
        cluster = cluster_of(settings)
        mine = sorted(t for t in cluster.topics() if t.startswith(settings.kafka.topic_prefix + "."))
        ids = cluster.topic_ids(mine)
        for name in mine:
            marks = cluster.watermarks(name)
            kept = sum(high - low for low, high in marks.values())
            typer.echo(f"{name:48} {ids[name]:24} partitions {len(marks):3}  records {kept}")


@broker_app.command("run")
def broker_run(words: Words = None, config: Config = None) -> None:
    """Run the broker in the foreground, for a supervisor or a container."""
    from runtime.broker import run_foreground
    from runtime.telemetry import configure

    settings = _settings(config, words)
    configure("broker", settings.log_level)
    with _plain_errors():
        raise SystemExit(run_foreground(settings.broker, settings.broker_dir))


@broker_app.command("start")
def broker_start(words: Words = None, config: Config = None) -> None:
    """Start the broker in the background."""
    from runtime.broker import start

    settings = _settings(config, words)
    with _plain_errors():
        for node in start(settings.broker, settings.broker_dir):
            typer.echo(f"node {node.node}: 127.0.0.1:{node.port}, pid {node.pid}")


@broker_app.command("stop")
def broker_stop(words: Words = None, config: Config = None) -> None:
    """Stop the broker that was started in the background."""
    from runtime.broker import stop

    settings = _settings(config, words)
    with _plain_errors():
        pids = stop(settings.broker_dir)
    typer.echo(f"stopped {', '.join(map(str, pids))}" if pids else f"no broker runs on {settings.broker_dir}")


@broker_app.command("status")
def broker_status(words: Words = None, config: Config = None) -> None:
    """Which nodes run; exit code 1 when none does."""
    from runtime.broker import status

    settings = _settings(config, words)
    nodes = status(settings.broker_dir)
    for node in nodes:
        typer.echo(
            f"node {node.node}: 127.0.0.1:{node.port}, pid {node.pid or '-'}, {'ready' if node.ready else 'not ready'}"
        )
    if not any(node.ready for node in nodes):
        _fail(f"no broker is ready on {settings.broker_dir}")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
